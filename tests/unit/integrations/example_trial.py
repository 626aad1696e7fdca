"""Runs in a framework's environment, by path: its example, which saves the weights of each step.

It waits for a line after each. The rate is one at which weights and tokens differ.
"""

import asyncio
import importlib
import json
import os
import re
import sys
from typing import Any

from tests.engines.trainer import save

NAMES = {"skyrl": "examples.13_skyrl", "areal": "examples.14_areal"}


def skyrl(example: Any, path: str) -> None:
    import ray  # noqa: PLC0415 - in that environment

    from deltachain.errors import ConfigError  # noqa: PLC0415
    from tests.engines.ray_cluster import clustered  # noqa: PLC0415

    class Policy(example.Policy):
        async def start(self, *given: Any) -> None:
            self.saved, said = 0, "a draft model was left behind"
            await super().start(*given)
            sender = self._weight_sync_engine
            assert type(sender).__name__ == "DeltaChainSender"
            sender.skyrl_draft_source = sender.source
            try:
                sender.send_weights()
            except ConfigError as error:
                said, sender.skyrl_draft_source = str(error.args[0]), None
            if said != "the chain has no weights of the draft model":
                raise AssertionError(said)

        async def step(self, *given: Any) -> None:
            await super().step(*given)
            self.saved += 1
            save(self.inner, f"{path}-{self.saved}")

    example.Policy = Policy
    cluster = clustered({"num_gpus": 2})
    ray.init = lambda **_: None  # it is
    asyncio.run(example.main())
    cluster.shutdown()


def areal(example: Any, path: str) -> None:
    made = example.actor

    def actor() -> Any:
        policy = made()
        update = policy.update_weights

        def updated(meta: Any) -> None:
            update(meta)
            save(policy.model, f"{path}-{meta.version}")

        policy.update_weights = updated
        return policy

    example.actor = actor
    example.main()


def main() -> None:
    path, url, address, framework = sys.argv[1:]
    if framework == "areal" and "RANK" not in os.environ:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])  # noqa: S606
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # frameworks log to the standard output

    def tell(line: str) -> None:
        said = [int(number) for number in re.findall(r"of (\d+) tokens", line)]
        lines.write(f"{json.dumps(said)}\n")
        lines.flush()
        assert sys.stdin.readline(), "stdin ended before the next step"

    os.environ |= {"AREAL_LLM_SERVER_ADDRS": address, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MODEL": path, "DELTACHAIN_URL": url, "SERVER": address, "SERVED": "tiny"}
    example: Any = importlib.import_module(NAMES[framework])
    example.TOKENS, example.RATE, example.print = 4, 1e-3, tell
    {"skyrl": skyrl, "areal": areal}[framework](example, path)


if __name__ == "__main__":
    main()
