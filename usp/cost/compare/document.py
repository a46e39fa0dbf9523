"""Write docs/cost.md.

python -m usp.cost.compare.document
"""

from __future__ import annotations

from pathlib import Path

from usp.config import TrainConfig
from usp.cost.methods import DEFAULT, Method
from usp.hf.models import load_model_config

from .comparison import compare
from .paper import TABLE_2, expert_row, grouped_rows, markdown, pipeline_row
from .tables import grids

DOCUMENT = Path(__file__).parents[3] / "docs" / "cost.md"

INTRODUCTION = """# What each parallelism costs

Written by `python -m usp.cost.compare.document`; every number comes from the code below `usp/cost`.

    python -m usp cost --model llama3-8b --seq-len 128K --batch 1 --devices 16
    python -m usp cost --methods ulysses8+ring2+zero3,tp-sp8+ring2 --ac full --plot cost.png
    python -m usp cost --json
    python -m usp cost --html cost.html

A method is made of parts joined by `+`: `ulysses`, `ring`, `usp` (which chooses the two: as much Ulysses as there are
key-value heads), `dp`, `hsdp`, `tp`, `tp-sp` (tensor parallelism with sequence parallelism between regions), `pp`,
`ep`, each with its degree, and `zero` with its stage. One part may leave its degree out: it takes the ranks that are
left. Without `zero`, copies are whole (stage 0); with `tp`, `pp` or `ep` it is stage 1.

## Two conventions

**On the wire**: payload bytes that one rank sends in one optimiser step of this implementation, for each axis of the
mesh and each collective: forward, backward, recomputation, gradients, gradient norm and token count. An all-reduce
counts as a reduce-scatter and an all-gather. Attention's bytes come from its own plan, so causal masks, windows, uneven
and replicated heads are counted as they are; FSDP2's include the padding of uneven rows, and the gathers that its
prefetch makes in vain inside a pipeline. Tests count the same where collectives pass torch's dispatcher, on up to 8
ranks: every axis alone, every pair and larger mixtures are equal to the byte, group by group and call by call.
Two things depend on data: experts are taken as chosen evenly, and sequences as one document each, which is the most.

**As the paper counts** (arXiv 2405.07719, Table 2): elements times an algorithm bandwidth factor, for one transformer
block, forward and backward: an all-reduce moves its elements twice, everything else once, whatever N.

## Table 2 in its own convention

`N` ranks, `d` hidden size, `L` tokens, `bs` sequences; `P`, `G` bytes of parameters and gradients in half precision,
`OS` of optimiser states, `A` of activations; `0 < α < 1`. Every cost is computed from the collectives beside it.

"""

NOTES = """
Where the table is inconsistent: with its own factors an all-reduce of a block's 12 O(d²) parameters costs 24 O(d²), a
gather and a scatter 24, two gathers and a scatter 36. It prints 12, 12 and 18. The ratios are right and the numbers
half, while the rows of TP and TP-sp do use the factors (4 all-reduces cost 8). `≤4` is the ring alone; any Ulysses
degree lowers it to 8/N + 4/u for `u` Ulysses ranks with a ring, 8/N without.

## EP and PP, which the table lacks

"""

DERIVATIONS = """
EP, for `k` experts per token (here 2): a token's rows go to their experts and back (2 all-to-alls of `k bs L d / N`),
and so do the gradients. An expert has one owner, so of the parameters only attention's 4 O(d²) are reduced. PP: at the
border of two stages hidden states go one way and gradients the other, bs L d each; blocks inside a stage send nothing.
Of M micro-batches the first of N stages has N in flight, each with 1/N of the layers: A/M.

## Grouped queries

With `g` query heads to a key-value head (here 4, as llama3-8b), keys and values are `g` times smaller, and so is what
the ring passes and the half of what Ulysses exchanges.

"""

WIRE = """
## Where this implementation differs from the paper's count

- Ulysses exchanges q, k and v in one all-to-all and the output in another, and keeps its own part: (N - 1)/N of the
  table's elements. With more ranks than key-value heads, a key-value head goes to every rank that reads it.
- The ring sends what a consumer sees and no more (half of the keys under a causal mask in the zigzag layout, only
  neighbours under a window), once in the forward and once in the backward. The gradients of keys and values travel too,
  in float32, which the table leaves out.
- Parameters are gathered in the computation's dtype and gradients reduced in float32: in bfloat16 a reduce-scatter
  costs twice its gather. Stage 0 all-reduces float32.
- TP's backward gathers nothing again: TP-sp has 4 gathers and 4 scatters a dense block, and full recomputation repeats
  the forward's but for the last scatter.
- Memory: weights are kept in float32 alone and cast as they are gathered, so between steps a shard takes 4 bytes, AdamW
  8 and its gradient 4, where the paper has P + G = 4 and 6P = 12.

## Memory

`peak` is the highest of the step's crests: the vocabulary loss and its backward, each layer's backward (in its MLP, in
the norm before it, in its attention, and while its gradients are reduced), the reduction of embedding and head, and the
optimiser. It counts tensors, without an allocator's gaps; what does not depend on the layer is exact, temporaries of a
layer's backward are those of its largest operators. `activations` are what forwards leave for backwards, at the most
that are in flight in a pipeline. zero-bubble's backward of the inputs frees none of them, and leaves the gradient at
every weight until the weights' half: those count as transient. How far all this is from the step itself, at full scale:
[benchmarks.md](benchmarks.md).

## An example

llama3-8b, 128K tokens, one sequence, 16 devices, bfloat16, nothing recomputed. Bytes of one rank and one step.

"""


def document() -> str:
    """The whole text."""
    example = TrainConfig(model="llama3-8b", seq_len=2**17, dtype="bfloat16")
    methods = [Method.parse(name) for name in DEFAULT]
    found = compare(methods, example, load_model_config(example.model), devices=16, batch=1)
    tables = "\n".join(grid.markdown() for grid in grids(found))
    extra = markdown((expert_row(experts_per_token=2), pipeline_row()))
    grouped = markdown(grouped_rows(group=4))
    return "".join((INTRODUCTION, markdown(TABLE_2), NOTES, extra, DERIVATIONS, grouped, WIRE, tables))


if __name__ == "__main__":
    DOCUMENT.write_text(document())
