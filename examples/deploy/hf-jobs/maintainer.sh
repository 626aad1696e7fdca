#!/usr/bin/env bash
# The maintainer as a scheduled Job: one round an hour, on a CPU. One for a bucket, no more.
set -euo pipefail

exec hf jobs scheduled run "@hourly" \
  --flavor cpu-upgrade \
  --timeout 50m \
  --secrets HF_TOKEN \
  "$@" \
  ghcr.io/astral-sh/uv:python3.12-bookworm-slim \
  uvx --from "deltachain[hf]" deltachain maintain "${DELTACHAIN_URL:-hf://buckets/me/policy/run-1}" --once
