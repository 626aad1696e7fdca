#!/usr/bin/env bash
# A replica as a Job on the Hub, for one hour; spaces/rollout is one that stays.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck disable=SC2016  # the shell of the Job expands MODEL
exec hf jobs run --detach \
  --name deltachain-replica \
  --flavor "${FLAVOR:-a10g-small}" \
  --timeout "${TIMEOUT:-1h}" \
  --expose 8000 \
  --env-file hf-jobs/replica.env \
  --secrets HF_TOKEN --secrets DELTACHAIN_TOKEN \
  "$@" \
  vllm/vllm-openai:v0.32.0 \
  bash -c 'pip install "deltachain[hf,signing,server]" && exec vllm serve "$MODEL" --worker-extension-cls deltachain_vllm.WorkerExtension --weight-transfer-config "{\"backend\": \"deltachain\"}"'
