"""Attention metadata for some rows of a step: a smaller batch of the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from depthdecay.errors import DepthDecayError
from depthdecay.integrations.vllm.layer_rows import Rows
from depthdecay.integrations.vllm.layers import Attend, Attention
from depthdecay.integrations.vllm.releases import build_metadata, split_block_size

# Backends whose builders return new metadata each time. Others keep one plan per step in their own buffers, which a
# second set of rows would overwrite.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def attend_with(
    attn_groups: Sequence[Sequence[Any]],
    block_tables: Sequence[torch.Tensor],
    slot_mappings: Sequence[torch.Tensor],
    device: torch.device,
) -> Attend:
    """Built from what a runner has prepared for the whole batch, per group of layers that share cache blocks."""

    def attend(rows: Rows) -> Attention:
        metadata: dict[str, Any] = {}
        slots: dict[str, torch.Tensor] = {}
        common = _common(rows, device)
        requests = torch.from_numpy(rows.requests_np).to(device, non_blocking=True)
        for groups, block_table, slot_mapping in zip(attn_groups, block_tables, slot_mappings, strict=True):
            own_slots = slot_mapping[rows.index]
            about = CommonAttentionMetadata(
                **common, block_table_tensor=block_table[requests], slot_mapping=own_slots, causal=True
            )
            for group in groups:
                built = build_metadata(group, about)
                for name in group.layer_names:
                    metadata[name], slots[name] = built, own_slots
        return metadata, slots

    return attend


def check_blocks(attn_groups: Sequence[Sequence[Any]]) -> None:
    """Refuse a cache whose blocks attention splits: it keeps their table in one buffer, which other rows overwrite."""
    for group in (group for groups in attn_groups for group in groups):
        split = split_block_size(group)
        if split is not None:
            raise DepthDecayError(
                f"attention splits cache blocks into blocks of {split}, which depth decay cannot do for some of the "
                f"rows; add --block-size {split}"
            )


def _common(rows: Rows, device: torch.device) -> dict[str, Any]:
    """What all groups share. The rows kept of a request are its first ones, so its length ends with them."""
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(rows.tokens))).astype(np.int32))
    lengths = torch.from_numpy(rows.computed + rows.tokens)
    return {
        "query_start_loc": starts.to(device, non_blocking=True),
        "query_start_loc_cpu": starts,
        "seq_lens": lengths.to(device, non_blocking=True),
        "seq_lens_cpu_upper_bound": lengths,
        "num_reqs": len(rows.tokens),
        "num_actual_tokens": len(rows.index_np),
        "max_query_len": int(rows.tokens.max()),
        "max_seq_len": int(lengths.max()),
        "is_prefilling": torch.from_numpy(rows.computed < rows.prompts),
    }
