"""The parts of the asynchronous demo that need no engine."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import TrainerState
from trl.experimental.async_grpo.packing import TreeRow

from examples.demo.online import engine as engines
from examples.demo.online.cpu import tree_attention
from examples.demo.online.engine import UnlabelledError, sample
from examples.demo.online.processes import Service, free_port, until
from examples.demo.online.report import rewards_of, unknown_in
from examples.demo.online.rollouts import Played
from examples.demo.online.run import answers, dashboard_command
from examples.demo.online.trainer import TRAINER_STATE, last_checkpoint

pytestmark = pytest.mark.full


def test_half_a_checkpoint_of_a_killed_trainer_is_passed_over(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    for step in (5, 10, 15, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (5, 10):
        TrainerState().save_to_json(str(tmp_path / f"checkpoint-{step}" / TRAINER_STATE))
    (tmp_path / "checkpoint-15" / TRAINER_STATE).write_text('{"epoch": 0.')
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


def rows(*samples: list[int]) -> TreeRow:
    row = TreeRow()
    for tokens in samples:
        ids = np.array(tokens)
        row.add(
            {
                "input_ids": ids,
                "completion_mask": np.ones_like(ids),
                "old_log_probs": np.zeros(len(ids), np.float32),
                "advantage": 1.0,
                "group_id": 0,
            }
        )
    return row


@pytest.mark.parametrize(
    "samples",
    [
        ([1, 2, 3, 4],),
        ([1, 2, 3, 4], [5, 6, 7]),
        ([1, 2, 3, 4, 5], [1, 2, 3, 9, 8, 7], [1, 2, 6]),
        ([1, 2, 3], [1, 2, 3, 4, 5]),
    ],
)
def test_every_sample_of_a_packed_row_attends_as_if_it_were_alone(
    samples: tuple[list[int], ...],
) -> None:
    row = rows(*samples)
    packed = row.pack()
    torch.manual_seed(0)
    table = torch.randn(3, 16, 4)  # of every token, for q, k, v
    ids, depths = packed["input_ids"], packed["position_ids"]
    q, k, v = (table[i, ids] + depths[:, None] for i in range(3))

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x[None, None].repeat(1, count, 1, 1)

    found, _ = tree_attention(
        None,
        heads(q, 4),
        heads(k, 2),
        heads(v, 2),
        None,
        tree_kv_index=packed["tree_kv_index"],
        tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
        tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
        scaling=0.5,
    )
    assert found.shape == (1, len(ids), 4, 4)
    for tokens in samples:
        own = torch.tensor(tokens)
        late = torch.arange(len(own))[:, None]
        a, b, c = (table[i, own] + late for i in range(3))
        expected = scaled_dot_product_attention(
            a[None], b[None], c[None], is_causal=True, scale=0.5
        )
        places = [_place(packed, tokens, depth) for depth in range(len(own))]
        assert torch.allclose(found[0, places, 0], expected[0], atol=1e-6)


def _place(packed: dict[str, Any], tokens: list[int], depth: int) -> int:
    """Where a token of a sample lies in a packed row: at the end of what it attends to."""
    wanted = torch.tensor(tokens[: depth + 1])
    starts, ends = packed["tree_cu_seqlens_q"][:-1], packed["tree_cu_seqlens_q"][1:]
    paths = packed["tree_cu_seqlens_k"]
    for number, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        path = packed["tree_kv_index"][paths[number] : paths[number + 1]]
        for place in range(begin, end):
            before = path[: len(path) - (int(end) - place) + 1]
            if torch.equal(packed["input_ids"][before], wanted):
                return place
    raise AssertionError


def answering(body: dict[str, Any]) -> httpx.AsyncClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=body))
    return httpx.AsyncClient(transport=transport, base_url="http://engine")


def vllm(spans: list[dict[str, Any]], *, finish: str = "stop") -> dict[str, Any]:
    content = [{"logprob": -1.0}, {"logprob": -2.0}, {"logprob": -3.0}]
    choice = {
        "token_ids": [7, 8, 9],
        "logprobs": {"content": content},
        "weight_versions": spans,
        "finish_reason": finish,
    }
    return {"choices": [choice]}


async def _draw(kind: engines.EngineKind, body: dict[str, Any]) -> engines.Sampled:
    async with answering(body) as client:
        return await sample(client, kind, [1], length=3, stop=[9], seed=0)


def draw(kind: engines.EngineKind, body: dict[str, Any]) -> engines.Sampled:
    import asyncio  # noqa: PLC0415

    return asyncio.run(_draw(kind, body))


def test_tokens_have_the_version_that_drew_them() -> None:
    spans = [{"start": 0, "end": 2, "version": "4"}, {"start": 2, "end": 3, "version": "5"}]
    found = draw("vllm", vllm(spans))
    assert (found.tokens, found.logprobs) == ((7, 8, 9), (-1.0, -2.0, -3.0))
    assert found.versions == (4, 4, 5)
    meta = {
        "output_token_logprobs": [[-1.0, 7, None], [-2.0, 8, None], [-3.0, 9, None]],
        "weight_versions": spans,
        "finish_reason": {"type": "stop"},
    }
    assert draw("sglang", {"output_ids": [7, 8, 9], "meta_info": meta}) == found
    assert not draw("vllm", vllm(spans, finish="abort")).finished


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"start": 0, "end": 2, "version": "4"}],
        [{"start": 1, "end": 3, "version": "4"}],
        [{"start": 0, "end": 3, "version": "default"}],
    ],
)
def test_tokens_of_no_known_version_are_refused(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(UnlabelledError):
        draw("vllm", vllm(spans))


def test_a_game_knows_what_it_drew() -> None:
    game = Played()
    game.read([1, 2])
    game.say(engines.Sampled(tokens=(3,), logprobs=(-0.5,), versions=(7,), finished=True))
    game.read([4])
    game.say(engines.Sampled(tokens=(5,), logprobs=(-0.25,), versions=(6,), finished=True))
    assert (game.drawn, game.logprobs, game.oldest) == ([0, 0, 1, 0, 1], [0, 0, -0.5, 0, -0.25], 6)


def written(tmp_path: Path, *lines: tuple[int, float, list[list[int]], int]) -> Path:
    diary = tmp_path / "samples"
    names = ("group", "reward", "versions", "held")
    diary.write_text(
        "".join(json.dumps(dict(zip(names, line, strict=True))) + "\n" for line in lines)
    )
    return diary


def test_labels_that_can_not_be(tmp_path: Path) -> None:
    assert unknown_in(written(tmp_path, (0, 0.0, [[3, 2], [6, 5]], 5))) == 5
    assert unknown_in(written(tmp_path, (0, 0.0, [[40, 3], [2, 1], [40, 2]], 40))) == 1
    assert unknown_in(written(tmp_path, (0, 0.0, [[0, 3]], -1))) == 3


def test_rewards_rise_by_more_than_chance(tmp_path: Path) -> None:
    earned = [0.0, 0.2, 0.1, 0.3, 0.9, 1.1, 1.0, 1.2]  # of four groups of two games
    lines = [(n // 2, reward, [[0, 1]], 0) for n, reward in enumerate(earned)]
    rewards = rewards_of(written(tmp_path, *lines), 0.5)
    assert (rewards.first, rewards.last) == pytest.approx((0.15, 1.05))
    assert rewards.error == pytest.approx(math.hypot(0.05, 0.05))  # means 0.1 and 0.2: ±0.05
    assert rewards_of(written(tmp_path, *lines), 0.1).error == math.inf  # one group tells nothing


def test_the_dashboard_of_a_run_asks_for_the_token_of_its_replica(tmp_path: Path) -> None:
    url, token = f"http://127.0.0.1:{free_port()}", "of this run"
    words = dashboard_command(str(tmp_path / "chain"), "http://127.0.0.1:1", url)
    with Service("dashboard", words, tmp_path, {"DELTACHAIN_TOKEN": token}) as page:
        until(lambda: answers(url), page, 120)
        assert httpx.get(f"{url}/api/overview").status_code == 401
        headers = {"authorization": f"Bearer {token}"}
        found = httpx.get(f"{url}/api/overview", headers=headers).json()
        assert [one["engine"] for one in found["replicas"]] == ["http://127.0.0.1:1"]
