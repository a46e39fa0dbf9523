"""Train with transformers' Trainer (on accelerate), with each sequence sharded over the ranks.

    torchrun --nproc-per-node 4 examples/hf_trainer.py --ulysses 2 --ring 2

Four changes to a regular Trainer script: `apply_unified_sp` on the model, equal rows for all ranks that share a
sequence, a collator that shards them, and a loss normalized by the number of targets on all ranks.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from usp import apply_unified_sp, shard_batch
from usp.losses import causal_lm_loss, global_token_count
from usp.parallel import ParallelDims, ParallelMesh
from usp.run.launch import leave

VOCAB = 512


class Counting(Dataset):
    """A dataset of rows that count modulo the vocabulary."""

    def __init__(self, rows: int, seq_len: int) -> None:
        self.rows, self.seq_len = rows, seq_len

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> torch.Tensor:
        return (7 * row + torch.arange(self.seq_len)) % VOCAB


class SequenceParallelTrainer(Trainer):
    """A Trainer whose batches are sharded over the mesh.

    The default data loader gives every rank different rows; this one divides rows only over the mesh's batch axis.
    """

    mesh: ParallelMesh

    def get_train_dataloader(self) -> DataLoader:
        rows = self.args.per_device_train_batch_size
        indices = range(self.mesh.rank("batch"), len(self.train_dataset), self.mesh.size("batch"))
        mine = torch.utils.data.Subset(self.train_dataset, list(indices))
        return DataLoader(mine, batch_size=rows, drop_last=True, collate_fn=self._shard)

    def _shard(self, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = torch.stack(rows)
        return shard_batch({"input_ids": ids, "labels": ids}, self.mesh, layout="zigzag")

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        targets = inputs["shift_labels"]
        out = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False)
        share = causal_lm_loss(out.logits, targets, global_token_count(targets, self.mesh))
        loss = share * self.mesh.size("loss")  # DistributedDataParallel averages gradients, which must be summed
        return (loss, out) if return_outputs else loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ulysses", type=int, default=2, help="Ulysses degree")
    parser.add_argument("--ring", type=int, default=2, help="ring degree")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--output", default="trainer-output", help="directory of the Trainer's output")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    arguments = TrainingArguments(  # initializes the process group
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not cuda,
        ddp_backend="nccl" if cuda else "gloo",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    mesh = ParallelMesh.create(ParallelDims(ulysses=args.ulysses, ring=args.ring), "cuda" if cuda else "cpu")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCAB}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4)
    torch.manual_seed(0)
    model = apply_unified_sp(AutoModelForCausalLM.from_config(config), mesh, layout="zigzag")
    trainer = SequenceParallelTrainer(model=model, args=arguments, train_dataset=Counting(1024, args.seq_len))
    trainer.mesh = mesh
    trainer.train()
    if dist.get_rank() == 0:
        print(f"loss {trainer.state.log_history[0]['loss']:.4f} -> {trainer.state.log_history[-2]['loss']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    leave()  # exits without interpreter teardown, which may abort with gloo
