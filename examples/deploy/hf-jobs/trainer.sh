#!/usr/bin/env bash
# The trainer as a Job on the Hub: publishes into a bucket of yours, for a Space or a Job to follow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

exec hf jobs uv run --detach \
  --name deltachain-trainer \
  --flavor "${FLAVOR:-a10g-small}" \
  --timeout "${TIMEOUT:-12h}" \
  --env-file hf-jobs/trainer.env \
  --secrets HF_TOKEN \
  "$@" \
  train.py
