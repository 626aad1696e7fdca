"""The names of SGLang that deltachain takes, by what it does with them; imports no SGLang itself.

SGLang ignores a hook of a function that it does not have, so all of them are here.
"""

from typing import Final

from deltachain.replica.capabilities import Capability, Table

IN_PLACE: Final = "in_place"
"""Pause mode in which caches and running requests are kept."""

OUTLIVING: Final = ("enable_hierarchical_cache", "enable_lmcache")
"""Options with which cached prefixes outlive a flush, or prevent the scheduler from flushing."""

MOVING: Final = {
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "enable_eplb": False,
    "elastic_ep_backend": None,
    "enable_elastic_expert_backup": False,
}
"""Options with which experts are copied or moved between slots, and their usual values."""

_CONTEXT: Final = "sglang.srt.runtime_context"
_LOADER: Final = "sglang.srt.model_loader.loader"
_MANAGERS: Final = "sglang.srt.managers"
_TOKENIZER: Final = f"{_MANAGERS}.tokenizer_manager:TokenizerManager"
_SCHEDULER: Final = f"{_MANAGERS}.scheduler:Scheduler"
_UPDATER: Final = f"{_MANAGERS}.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_LAYERS: Final = "sglang.srt.layers"
_MESSAGES: Final = f"{_MANAGERS}.io_struct"
_FIELDS: Final = "sglang.srt.arg_groups.fields"
_HTTP: Final = "sglang.srt.entrypoints.http_server"

TABLE: Final = Table(
    engine="SGLang",
    tested=("0.5.22", "0.5.23"),
    rows=(
        Capability(
            "hooks its functions",
            (
                "sglang.srt.plugins.hook_registry:HookRegistry._hooks",
                "sglang.srt.plugins.hook_registry:HookRegistry.register(target, hook, hook_type)",
                "sglang.srt.plugins.hook_registry:HookType.AROUND",
            ),
        ),
        Capability(
            "asks its schedulers",
            (
                f"{_UPDATER}.check_weights(recv_req)",
                f"{_UPDATER}.tp_worker",
                f"{_UPDATER}.scheduler",
                f"{_UPDATER}.offload_tags",
                f"{_UPDATER}.is_fully_idle(ignore_waiting)",
                f"{_UPDATER}.flush_cache(empty_cache)",
                f"{_SCHEDULER}.grammar_manager",
                f"{_SCHEDULER}._engine_paused",
                f"{_TOKENIZER}.check_weights(obj, request)",
                f"{_TOKENIZER}.auto_create_handle_loop()",
                f"{_MESSAGES}:CheckWeightsReqInput(action)",
                f"{_MESSAGES}:CheckWeightsReqOutput(success, message)",
                f"{_MANAGERS}.mm_schedule:embedding_cache",
                f"{_CONTEXT}:get_parallel()",
                f"{_CONTEXT}:get_serving()",
            ),
        ),
        Capability(
            "pauses generation",
            (
                f"{_SCHEDULER}.pause_generation(recv_req)",
                f"{_SCHEDULER}.cur_batch_for_debug",
                f"{_TOKENIZER}.pause_generation(obj)",
                f"{_TOKENIZER}.continue_generation(obj)",
                f"{_TOKENIZER}.abort_request(abort_all)",
                f"{_TOKENIZER}.is_pause",
                f"{_TOKENIZER}.is_pause_cond",
                f"{_TOKENIZER}.model_update_lock",
                f"{_MESSAGES}:PauseGenerationReqInput(mode)",
                f"{_MESSAGES}:ContinueGenerationReqInput(torch_empty_cache)",
            ),
        ),
        Capability(
            "learns that it ended",
            (f"{_TOKENIZER}._subprocess_watchdog", f"{_TOKENIZER}.gracefully_exit"),
        ),
        Capability(
            "labels tokens with their version",
            (
                f"{_SCHEDULER}.record_weight_version_change(new_version)",
                f"{_SCHEDULER}.result_queue",
                f"{_SCHEDULER}.chunked_req",
                f"{_MANAGERS}.schedule_batch:Req.weight_version_events",
                "sglang.srt.utils.weight_versions:WeightVersionEvent"
                "(old_version, num_output_tokens)",
                f"{_TOKENIZER}.update_weight_version(obj)",
                f"{_MESSAGES}:UpdateWeightVersionReqInput(new_version, abort_all_requests)",
            ),
        ),
        Capability(
            "finds its layers",
            (
                "sglang.srt.model_executor.model_runner:ModelRunner.load_model",
                "sglang.srt.model_executor.model_runner:ModelRunner.weight_updater",
                "sglang.srt.model_executor.model_runner_components"
                ".weight_updater:_unsupported_derived_weight_cache_error(model)",
                "sglang.srt.lora.layers:BaseLayerWithLoRA",
                f"{_LAYERS}.linear:LinearBase",
                f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead",
                f"{_LAYERS}.moe.fused_moe_triton.layer:FusedMoE",
                f"{_LAYERS}.moe.token_dispatcher.standard:StandardDispatchOutput",
                f"{_LAYERS}.moe.topk:StandardTopKOutput",
                f"{_LAYERS}.logits_processor:should_apply_lm_head_quant_method",
                "sglang.srt.utils:use_intel_amx_backend",
                f"{_CONTEXT}:get_model()",
            ),
        ),
        Capability(
            "loads and packs layers",
            (
                "sglang.srt.model_loader.utils:set_default_torch_dtype(dtype)",
                f"{_LOADER}:device_loading_context(module, target_device)",
                f"{_LOADER}:DefaultModelLoader.load_weights_only(model, weights, target_device)",
                f"{_LOADER}:QuantizedRLModelLoader.is_reload_scenario(model)",
                f"{_LOADER}:_get_quantization_config(model_config, load_config)",
                f"{_LOADER}:_initialize_model(model_config, load_config, quant_config)",
                "sglang.srt.configs.load_config:LoadConfig()",
                f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"
                ".restore_weights_before_loading(layer)",
                f"{_LAYERS}.quantization.base_config:QuantizeMethodBase"
                ".process_weights_after_loading(layer)",
            ),
        ),
        Capability(
            "refuses arrangements that no update reaches",
            (
                *(f"{_CONTEXT}:get_{part}()" for part in ("exec", "spec", "disagg", "memory")),
                *(
                    f"{_FIELDS}.parallel:Parallel.{name}"
                    for name in ("dp_size", "pp_size", "nnodes")
                ),
                *(f"{_FIELDS}.exec_:ExecMoe.{name}" for name in MOVING),
                *(f"{_FIELDS}.memory:Memory.{name}" for name in OUTLIVING),
                f"{_FIELDS}.spec:Spec.speculative_algorithm",
                f"{_FIELDS}.disagg:Disagg.disaggregation_mode",
                f"{_FIELDS}.serving:Serving.enable_streaming_session",
                f"{_FIELDS}.serving:Serving.tokenizer_worker_num",
                f"{_FIELDS}.model:Model.weight_cache_mode",
            ),
        ),
        Capability(
            "adds routes and a leader to a server",
            (
                f"{_HTTP}:app",
                f"{_HTTP}:get_global_state()",
                f"{_HTTP}:_setup_and_run_http_server",
                "sglang.srt.utils.auth:auth_level(level)",
                "sglang.srt.utils.auth:AuthLevel.ADMIN_OPTIONAL",
                "sglang.srt.utils:kill_process_tree(parent_pid, include_parent)",
                "sglang.srt.entrypoints.engine:Engine._ensure_event_loop()",
                f"{_TOKENIZER}.update_weights_from_disk(obj, request)",
            ),
        ),
        Capability(
            "notices sleep",
            (
                f"{_TOKENIZER}.release_memory_occupation(obj, request)",
                f"{_TOKENIZER}.resume_memory_occupation(obj, request)",
                f"{_UPDATER}.release_memory_occupation(recv_req)",
                "sglang.srt.constants:GPU_MEMORY_ALL_TYPES",
            ),
        ),
        Capability(
            "keeps caches by version",
            (
                f"{_SCHEDULER}._add_request_to_queue(req)",
                f"{_SCHEDULER}.waiting_queue",
                f"{_MANAGERS}.schedule_batch:Req.cache_salt",
            ),
            without=f"pause mode {IN_PLACE} is refused",
            needed_by=IN_PLACE,
        ),
    ),
)
