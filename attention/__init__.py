"""Exact attention over sequences sharded across a ring x ulysses grid of ranks: forward, backward, and decoding.

Depends only on torch and, for plans, numpy; process groups, sequence layouts and kernels are passed in. Each file
imports only earlier ones:

versions, intervals, spec, balance, layout, bands, tiles, schedule, heads, fused, accumulate, kernels, comm, keep, ring,
sparse, ulysses, unified, decode.
"""

from .versions import require

# isort: split
from .accumulate import accumulate_dtype
from .balance import causal_pairs
from .bands import Task, band_pairs, block_tasks, rank_pieces
from .comm import Channel, Exposed
from .decode import DecodeStep, KVCache, Prefill, merge_parts
from .heads import HeadPlan
from .keep import Keep, KeepResults, compute_now
from .kernels.base import LSE_COLUMNS, Device, Kernel
from .kernels.select import KERNEL_NAMES, check_kernel_name, select_kernel
from .layout import LAYOUTS, OF_DOCUMENTS, SequenceLayout, Span, counted_windows, layout_name, parse_layout
from .ring import RingProgram
from .schedule import Message, RingSchedule, ring_schedule
from .sparse import KeyChoice, SparseProgram, attend_to_rows, chosen_rows, token_tiles
from .spec import AttentionSpec, Joint, MaskMod
from .tiles import with_mask_mod
from .unified import AttentionOp, UnifiedPlan, WireBytes, unified_attention, unified_backward, unified_forward
