"""What SGLang calls for drafts on a CPU, in torch: drafts are a chain, attention is causal."""

import ctypes
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def copy_all_layer_kv_cache_cpu(
    addresses: Tensor, strides: Tensor, target: Tensor, source: Tensor
) -> None:
    count = int(torch.cat((target, source)).max()) + 1
    for address, stride in zip(addresses.tolist(), strides.tolist(), strict=True):
        rows = (ctypes.c_uint8 * (count * stride)).from_address(address)
        cache = np.frombuffer(rows, np.uint8).reshape(count, stride)
        cache[target.numpy()] = cache[source.numpy()]


def assign_req_to_token_pool_cpu(*given: Any) -> None:
    pool, table, start, end, found, _ = given
    rows = zip(pool.tolist(), start, end, strict=True)
    for row, first, last in rows:
        table[row, first:last] = found[: last - first].to(table.dtype)
        found = found[last - first :]


def assign_extend_cache_locs_cpu(*given: Any) -> None:
    pool, table, start, end, out, _ = given
    found = [table[p, s:e] for p, s, e in zip(pool.tolist(), start, end, strict=True)]
    joined = torch.cat(found)
    out[: len(joined)] = joined.to(out.dtype)


def assign_draft_cache_locs_contiguous_cpu(*given: Any) -> None:
    pool, table, lengths, out, width, topk, steps = given
    assign_extend_cache_locs_cpu(pool, table, lengths, lengths + topk * steps, out, width)


def build_draft_decode_metadata_cpu(table: Tensor, pool: Tensor, *_: Any) -> Tensor:
    return table[pool]


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    rows = tokens.reshape(-1, stride)[: len(lengths)]
    bonus[:] = rows.gather(1, lengths[:, None].long() - 1)[:, 0].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(index: Tensor, out_cache_loc: Tensor, accepted: Tensor) -> None:
    found = out_cache_loc[index[index > -1].long()]
    accepted[: len(found)] = found.to(accepted.dtype)


def build_tree_kernel_efficient_cpu(*given: Any) -> None:
    _, _, lengths, mask, positions, index, child, sibling, topk, _, count, _ = given
    assert topk == 1
    chain, requests = torch.arange(count), len(lengths)
    positions.copy_((lengths[:, None] + chain).flatten())
    index.copy_(torch.arange(requests * count).view(requests, count))
    child.copy_(torch.cat((chain[1:], torch.tensor([-1]))).expand(requests, count))
    sibling.fill_(-1)
    mask[: requests * count * count] = torch.ones(count, count).tril().flatten().repeat(requests)


def reconstruct_indices_from_tree_mask(*given: Any) -> None:
    mask, lengths, positions, index, child, sibling, requests, count = given
    trees = mask[: requests * count * count].view(requests, count, count).bool()
    above = trees & torch.ones(count, count, dtype=torch.bool).tril(-1)
    positions.copy_((above.sum(-1) + lengths[:, None]).flatten())
    index.copy_(torch.arange(requests * count).view(requests, count))
    child.fill_(-1)
    sibling.fill_(-1)
    for request in range(requests):
        parents = [int(row.nonzero().max()) if row.any() else -1 for row in above[request]]
        for parent in range(count):
            children = [node for node in range(count) if parents[node] == parent]
            child[request, parent] = children[0] if children else -1
            for one, following in pairwise(children):
                sibling[request, one] = following


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    wanted = target_predict.flatten()
    for request, drafts in enumerate(candidates.tolist()):
        node, last, taken = 0, int(retrive_index[request, 0]), [int(retrive_index[request, 0])]
        while len(taken) < accept_index.shape[1]:
            node = int(retrive_next_token[request, node])
            while node != -1 and drafts[node] != int(wanted[last]):
                node = int(retrive_next_sibling[request, node])
            if node == -1:
                break
            predicts[last] = wanted[last]
            last = int(retrive_index[request, node])
            taken.append(last)
        accept_index[request, : len(taken)] = torch.tensor(taken)
        accept_token_num[request] = len(taken) - 1
        predicts[last] = wanted[last]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None
) -> Tensor:
    q, k, v = (one.transpose(0, 1)[None] for one in (query, keys, values))
    found = scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1)


def _extend(query: Tensor, _k: Any, _v: Any, out: Tensor, *given: Any) -> None:
    keys, values, _, _, table, pool, lengths, counts, starts, _, scale, *rest = given
    tree = rest[5]
    for n, (row, length, count, start) in enumerate(
        zip(pool.tolist(), lengths.tolist(), counts.tolist(), starts.tolist(), strict=True)
    ):
        at = table[row, :length].long()
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        if tree is not None:
            visible[:, length - count :] = tree.view(-1, count, count)[n].bool()
        out[start : start + count] = _attend(
            query[start : start + count], keys[at], values[at], scale, visible
        )


def _decode(query: Tensor, keys: Tensor, values: Tensor, *given: Any) -> None:
    _, _, out, new_keys, new_values, where, _, table, pool, lengths, scale, *_ = given
    if new_keys is not None and new_values is not None:
        keys[where] = new_keys.view(-1, *keys.shape[1:])
        values[where] = new_values.view(-1, *values.shape[1:])
    for n, (row, length) in enumerate(zip(pool.tolist(), lengths.tolist(), strict=True)):
        at = table[row, :length].long()
        out[n] = _attend(query[n : n + 1], keys[at], values[at], scale, None)[0]


vars(torch.ops.sgl_kernel).update(extend_attention_cpu=_extend, decode_attention_cpu=_decode)
