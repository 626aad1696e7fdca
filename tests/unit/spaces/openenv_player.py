# ruff: noqa: T201 - what it prints is read
"""A game played by a client of OpenEnv, which has an environment of its own."""

import json
import sys

from openenv import GenericEnvClient


def main() -> None:
    url, word, wrong = sys.argv[1:]
    with GenericEnvClient(base_url=url).sync() as game:
        print(json.dumps(vars(game.reset(seed=7, episode_id="mine"))))
        print(json.dumps(vars(game.step({"word": wrong}))))
        print(json.dumps(game.state()))
        print(json.dumps(vars(game.step({"word": word}))))
        try:
            game.step({"word": word})
        except RuntimeError as exc:
            print(json.dumps(str(exc)))
        print(json.dumps(vars(game.reset(seed=8))))


if __name__ == "__main__":
    main()
