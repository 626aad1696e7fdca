"""Follower process of the demo: a replica that follows the chain and generates text.

Prints one JSON object a line. One line on standard input ends it: the last version, and the version
to roll back to.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from deltachain.store import open_store
from deltachain.subscribe import SubscribeConfig, Subscriber
from examples.demo.generate import generate_text, load_for_generation
from examples.demo.process_setup import quiet_libraries, spare_one_core

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

PROMPT: Final = "the small crow"
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class DemoReplica:
    model: "Qwen3ForCausalLM"
    tokenizer: "PreTrainedTokenizerFast"
    subscriber: Subscriber
    out: Path

    def say(self, event: str, **facts: object) -> None:
        text = generate_text(self.model, self.tokenizer, PROMPT, max_new_tokens=12)
        version = self.subscriber.version
        line = {"event": event, "version": version, "text": PROMPT + text, **facts}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    def save(self, name: str) -> None:
        with quiet_libraries():
            self.model.save_pretrained(self.out / name)


class StdinCommands:
    def __init__(self) -> None:
        self.last: int | None = None
        self.back_to = 0
        self.arrived = Event()
        Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        line = sys.stdin.readline()
        if line:  # otherwise the trainer has exited
            order = json.loads(line)
            self.last, self.back_to = order["last"], order["back_to"]
        self.arrived.set()


def main() -> None:
    """Follow, generate and save at the given steps; then roll back and release."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--save-steps", type=int, nargs="*", default=())
    arguments = parser.parse_args()
    model, tokenizer = load_for_generation(arguments.checkpoint)
    store = open_store(arguments.url)
    limited = store.capabilities.poll_s > 1  # such stores limit the rate of requests
    config = SubscribeConfig(url=arguments.url, poll_s=None if limited else POLL_S)
    with spare_one_core(), Subscriber(config, model, store=store) as subscriber:
        replica = DemoReplica(model, tokenizer, subscriber, arguments.out)
        replica.say("ready")
        _follow(replica, set(arguments.save_steps))


def _follow(replica: DemoReplica, save_steps: set[int]) -> None:
    orders, stop = StdinCommands(), Event()
    subscriber = replica.subscriber
    Thread(target=_stop_at_last, args=(orders, subscriber, stop), daemon=True).start()
    for receipt in subscriber.follow(stop=stop, every_version=True):
        if receipt.step in save_steps:
            replica.save(f"step-{receipt.step}")
        replica.say(
            "applied",
            step=receipt.step,
            nnz=receipt.nnz,
            stage_ms=1e3 * (receipt.fetch_s + receipt.stage_s),
            swap_ms=1e3 * receipt.swap_s,
            lag_versions=receipt.lag_versions,
            staleness_s=receipt.staleness_s,
        )
    if orders.last is None:
        return
    subscriber.rollback(orders.back_to)
    replica.save("rollback")
    replica.say("rolled back")
    subscriber.release()
    subscriber.update()
    replica.save("released")
    replica.say("released")


def _stop_at_last(orders: StdinCommands, subscriber: Subscriber, stop: Event) -> None:
    orders.arrived.wait()
    while orders.last is not None and subscriber.version != orders.last:
        stop.wait(POLL_S)
    stop.set()
    subscriber.notify()


if __name__ == "__main__":
    main()
