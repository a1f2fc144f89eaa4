"""What other systems call our keys: their name to our key, or to a sentence where there is no such key.

A name may be dotted (`zero_optimization.stage`); it is looked up with everything before it left out, so that
`training.local_batch_size` is found with and without its section. Names are lower case with underscores.
"""

from collections.abc import Mapping
from types import MappingProxyType

_ACCUMULATION = "accumulation follows from batch.sequences_per_step / (dp * batch.sequences_per_microbatch)"
_BATCH = "batch.sequences_per_step (of one optimizer step) or batch.sequences_per_microbatch (of one forward pass of one rank)"
_EPOCHS = "train.epochs"
_DTYPE = "precision.compute (fp8, fp16, bf16, fp32, fp64 or auto)"
_ZERO = "zero.stage: 1 shards optimizer state, 2 and gradients, 3 and parameters"
_OFFLOAD = "memory.offload.optimizer and, with zero.stage=3, memory.offload.parameters: fractions from 0 to 1"
_ACTIVATION_OFFLOAD = "memory.offload.activations: a fraction of the layers, from 0 to 1"
_WARMUP_RATIO = "optim.schedule.warmup_steps, in steps"
_OUTPUT = "run.root (the folder of all runs) and run.id (this run's folder in it)"
_RESUME = "a run with the same run.id resumes from its newest checkpoint by itself"
_WANDB = "track.wandb.mode: auto, online, offline or disabled"
_MODEL = (
    "the architecture is a Hugging Face config: model.family and model.config.*, or a recipe such as model=llama3_2_1b"
)
_OPTIMIZER = "optim.name, or an optimizer's recipe: optim=adamw, optim=lion, optim=sgd"
_BETAS = "optim.betas=[0.9,0.95], a list of two"
_DATA = "data.sources.NAME.path"
_ADAPTERS = "adapters such as LoRA are not in this version: all parameters are trained, but those of model.freeze"
_QUANTIZED = "training quantized weights is not in this version: precision.compute is fp8, fp16, bf16, fp32 or fp64"
_CHAT = "chat formats are not in this version: it trains on plain text, data.sources.NAME.field of each record"
_PREFERENCES = "training on preferences is not in this version: it trains to predict the next token"

_AUX_LOSS = "model.config.router_aux_loss_coef, in the loss with model.config.output_router_logits=true"
_NO_Z_LOSS = (
    "a z-loss of routers is not in this version: no family of transformers has one that the exported model would know"
)
_EXPERT_COUNT = "the number of experts is the family's: model.config.num_experts, num_local_experts or n_routed_experts"
_TOP_K = "model.config.num_experts_per_tok, under the name that the family's config has"
_EXPERT_WIDTH = "model.config.moe_intermediate_size, or model.config.intermediate_size where all layers have experts"
_ULYSSES = "parallel.cp, with parallel.context=ulysses"
_DISPATCH = "tokens always travel by all-to-all (parallel.ep); with parallel.expert_hierarchical node by node"
_GROUPED = (
    "model.experts chooses how experts are multiplied; with parallel.ep grouped matmuls are used where they are fast"
)
_CAPACITY = "model.expert_capacity, over an even share; null (the default) drops no token"
_SCORING = "how a router scores is the family's: model.family and its model.config"

_HF_TRAINER = MappingProxyType(
    {
        "learning_rate": "optim.lr",
        "per_device_train_batch_size": "batch.sequences_per_microbatch",
        "per_gpu_train_batch_size": "batch.sequences_per_microbatch",
        "per_device_eval_batch_size": "validation uses batch.sequences_per_microbatch",
        "gradient_accumulation_steps": _ACCUMULATION,
        "max_steps": "train.steps",
        "num_train_epochs": _EPOCHS,
        "warmup_steps": "optim.schedule.warmup_steps",
        "warmup_ratio": _WARMUP_RATIO,
        "lr_scheduler_type": "optim.schedule.name",
        "lr_scheduler_kwargs": "the keys of optim.schedule",
        "max_grad_norm": "optim.clip_norm",
        "adam_beta1": _BETAS,
        "adam_beta2": _BETAS,
        "adam_epsilon": "optim.eps",
        "optim_args": _OPTIMIZER,
        "bf16": "precision.compute",
        "fp16": _DTYPE,
        "tf32": _DTYPE,
        "torch_dtype": "precision.compute",
        "dtype": "precision.compute",
        "gradient_checkpointing": "memory.activation_checkpointing",
        "torch_compile": "memory.compile",
        "save_steps": "checkpoint.every_steps",
        "save_strategy": "checkpoint.every_steps or checkpoint.every_minutes",
        "save_total_limit": "checkpoint.keep",
        "eval_steps": "train.validate_every_steps",
        "eval_strategy": "train.validate_every_steps",
        "evaluation_strategy": "train.validate_every_steps",
        "logging_steps": "track.every_steps",
        "report_to": _WANDB,
        "run_name": "run.id",
        "output_dir": _OUTPUT,
        "overwrite_output_dir": "a run's folder is never overwritten: give another run.id",
        "resume_from_checkpoint": _RESUME,
        "model_name_or_path": "model.weights",
        "config_name": "model.family and model.config",
        "tokenizer_name": "model.tokenizer",
        "attn_implementation": "model.attention",
        "dataset_name": _DATA,
        "train_file": _DATA,
        "validation_split_percentage": "data.validation, a share from 0 to 0.5",
        "block_size": "batch.context",
        "max_seq_length": "batch.context",
        "max_length": "batch.context",
        "dataset_text_field": "data.sources.NAME.field",
        "packing": "data.pack",
        "dataloader_num_workers": "training reads a memory-mapped token store and needs no loader processes",
        "local_rank": "the launcher sets ranks: launch.ranks",
        "nproc_per_node": "launch.ranks",
        "num_processes": "launch.ranks",
        "fsdp": _ZERO,
        "deepspeed": _ZERO,
        "use_cpu": "launch.device",
        "no_cuda": "launch.device",
    }
)
_DEEPSPEED = MappingProxyType(
    {
        "train_batch_size": "batch.sequences_per_step",
        "train_micro_batch_size_per_gpu": "batch.sequences_per_microbatch",
        "micro_batch_per_gpu": "batch.sequences_per_microbatch",
        "gradient_clipping": "optim.clip_norm",
        "zero_optimization": "zero.stage",
        "zero_optimization.stage": "zero.stage",
        "zero_stage": "zero.stage",
        "zero_optimization.offload_optimizer.device": _OFFLOAD,
        "zero_optimization.offload_param.device": _OFFLOAD,
        "zero_optimization.overlap_comm": "gradient reduction overlaps with backward always",
        "zero_optimization.contiguous_gradients": "gradients are contiguous always",
        "zero_optimization.reduce_bucket_size": "gradients are reduced unit by unit; there is no bucket size to set",
        "zero_optimization.allgather_bucket_size": "parameters are gathered unit by unit; there is no bucket size to set",
        "bf16.enabled": "precision.compute",
        "fp16.enabled": _DTYPE,
        "fp16.loss_scale": "precision.loss_scale: dynamic, or a number (0 elsewhere means dynamic)",
        "optimizer.type": "optim.name",
        "optimizer.params.lr": "optim.lr",
        "optimizer.params.betas": "optim.betas",
        "optimizer.params.eps": "optim.eps",
        "optimizer.params.weight_decay": "optim.weight_decay",
        "scheduler.type": "optim.schedule.name",
        "scheduler.params.warmup_num_steps": "optim.schedule.warmup_steps",
        "scheduler.params.total_num_steps": "train.steps",
        "warmup_num_steps": "optim.schedule.warmup_steps",
        "total_num_steps": "train.steps",
        "steps_per_print": "track.every_steps",
        "sequence_parallel_size": _ULYSSES,
        "wall_clock_breakdown": "metrics.jsonl has the times of every step",
        "communication_data_type": "precision.reduce",
        "activation_checkpointing.partition_activations": "memory.activation_checkpointing",
        "activation_checkpointing.cpu_checkpointing": _ACTIVATION_OFFLOAD,
        "moe.ep_size": "parallel.ep",
        "moe_expert_parallel_size": "parallel.ep",
        "moe.num_experts": _EXPERT_COUNT,
        "use_tutel": _GROUPED,
        "min_capacity": _CAPACITY,
        "eval_capacity_factor": "validation drops as training does: model.expert_capacity",
        "drop_tokens": _CAPACITY,
        "use_residual": "shared experts are the family's: model.family and its model.config",
        "noisy_gate_policy": _SCORING,
    }
)
_MEGATRON = MappingProxyType(
    {
        "tensor_model_parallel_size": "parallel.tp",
        "pipeline_model_parallel_size": "parallel.pp",
        "context_parallel_size": "parallel.cp",
        "cp_comm_type": "parallel.context: ring (p2p), ulysses (a2a), gather (all_gather), [u, r] (a2a+p2p)",
        "hierarchical_context_parallel_sizes": "parallel.context=[u, r], the ulysses and the ring degree",
        "expert_model_parallel_size": "parallel.ep",
        "expert_tensor_parallel_size": "parallel.expert_tp",
        "num_moe_experts": _EXPERT_COUNT,
        "moe_router_topk": _TOP_K,
        "moe_ffn_hidden_size": _EXPERT_WIDTH,
        "moe_shared_expert_intermediate_size": "model.config.shared_expert_intermediate_size or n_shared_experts, by the family",
        "moe_layer_freq": "model.config.first_k_dense_replace, mlp_only_layers or decoder_sparse_step, by the family",
        "moe_aux_loss_coeff": _AUX_LOSS,
        "moe_z_loss_coeff": _NO_Z_LOSS,
        "moe_router_load_balancing_type": "model.config.output_router_logits=true (auxiliary loss) or model.router_bias_rate",
        "moe_router_enable_expert_bias": "model.router_bias_rate, with model.router_bias=added for routers without a bias",
        "moe_router_bias_update_rate": "model.router_bias_rate",
        "moe_router_score_function": _SCORING,
        "moe_router_pre_softmax": _SCORING,
        "moe_router_topk_scaling_factor": "model.config.routed_scaling_factor",
        "moe_router_num_groups": "model.config.n_group",
        "moe_router_group_topk": "model.config.topk_group",
        "moe_router_dtype": "routers compute in the dtype that the family's code gives them",
        "moe_expert_capacity_factor": "model.expert_capacity",
        "moe_token_drop_policy": "model.expert_drop",
        "moe_pad_expert_input_to_capacity": "experts compute the tokens that they get, without padding",
        "moe_token_dispatcher_type": _DISPATCH,
        "moe_flex_dispatcher_backend": _DISPATCH,
        "moe_enable_deepep": _DISPATCH,
        "moe_grouped_gemm": _GROUPED,
        "moe_permute_fusion": _GROUPED,
        "overlap_moe_expert_parallel_comm": "parallel.expert_overlap",
        "moe_shared_expert_overlap": "shared experts are computed while tokens travel, always",
        "moe_per_layer_logging": "the load of every layer's experts is reported by itself: docs/experts.md",
        "moe_layer_recompute": "memory.activation_checkpointing",
        "data_parallel_size": "parallel.dp",
        "tensor_parallel_size": "parallel.tp",
        "pipeline_parallel_size": "parallel.pp",
        "expert_parallel_size": "parallel.ep",
        "tp_size": "parallel.tp",
        "pp_size": "parallel.pp",
        "cp_size": "parallel.cp",
        "ep_size": "parallel.ep",
        "dp_size": "parallel.dp",
        "sequence_parallel": "parallel.sequence",
        "tp_comm_overlap": "parallel.overlap",
        "use_distributed_optimizer": "zero.stage=1 shards the optimizer state",
        "micro_batch_size": "batch.sequences_per_microbatch",
        "global_batch_size": "batch.sequences_per_step",
        "rampup_batch_size": "the batch is the same in every step: batch.sequences_per_step",
        "seq_length": "batch.context",
        "encoder_seq_length": "batch.context",
        "max_position_embeddings": "model.config.max_position_embeddings (of the model) or batch.context (of this run)",
        "train_iters": "train.steps",
        "train_samples": "train.steps * batch.sequences_per_step are the samples of a run",
        "lr_decay_style": "optim.schedule.name",
        "lr_decay_iters": "train.steps, or optim.schedule.decay_steps with wsd",
        "lr_wsd_decay_iters": "optim.schedule.decay_steps",
        "lr_wsd_decay_style": "wsd decays linearly: optim.schedule.decay_steps sets how long",
        "lr_warmup_iters": "optim.schedule.warmup_steps",
        "lr_warmup_fraction": _WARMUP_RATIO,
        "min_lr": "optim.schedule.final_ratio (over optim.lr)",
        "clip_grad": "optim.clip_norm",
        "adam_eps": "optim.eps",
        "sgd_momentum": "optim.momentum",
        "optimizer": _OPTIMIZER,
        "recompute_granularity": "memory.activation_checkpointing",
        "recompute_activations": "memory.activation_checkpointing",
        "save_interval": "checkpoint.every_steps",
        "save": _OUTPUT,
        "load": _RESUME,
        "eval_interval": "train.validate_every_steps",
        "eval_iters": "train.validation_sequences, in sequences",
        "log_interval": "track.every_steps",
        "data_path": _DATA,
        "split": "data.validation, a share from 0 to 0.5",
        "tokenizer_model": "model.tokenizer",
        "tokenizer_type": "model.tokenizer",
        "vocab_size": "model.config.vocab_size",
        "num_layers": "model.config.num_hidden_layers (n_layer in gpt2)",
        "hidden_size": "model.config.hidden_size",
        "ffn_hidden_size": "model.config.intermediate_size",
        "num_attention_heads": "model.config.num_attention_heads",
        "num_query_groups": "model.config.num_key_value_heads",
        "init_method_std": "model.config.initializer_range",
        "accumulate_allreduce_grads_in_fp32": "precision.reduce",
        "overlap_grad_reduce": "gradient reduction overlaps with backward always",
        "attention_backend": "model.attention",
        "distributed_timeout_minutes": "there is no such key",
        "wandb_project": "track.wandb.project",
        "wandb_entity": "track.wandb.entity",
        "wandb_exp_name": "run.id",
    }
)
_TORCHTITAN = MappingProxyType(
    {
        "training.steps": "train.steps",
        "training.seed": "train.seed",
        "local_batch_size": "batch.sequences_per_microbatch",
        "seq_len": "batch.context",
        "max_norm": "optim.clip_norm",
        "mixed_precision_param": "precision.compute",
        "mixed_precision_reduce": "precision.reduce",
        "training.dataset": _DATA,
        "dataset_path": _DATA,
        "data_parallel_replicate_degree": "parallel.dp",
        "data_parallel_shard_degree": "zero.shard_within",
        "tensor_parallel_degree": "parallel.tp",
        "enable_async_tensor_parallel": "parallel.overlap",
        "pipeline_parallel_degree": "parallel.pp",
        "context_parallel_degree": "parallel.cp",
        "context_parallel_rotate_method": "parallel.context: ring (alltoall) or gather (allgather)",
        "context_parallel_load_balance": "a rank has a part from the front and one from the back, always",
        "expert_parallel_degree": "parallel.ep",
        "expert_tensor_parallel_degree": "parallel.expert_tp",
        "expert_parallel_comm_backend": _DISPATCH,
        "moe_args.num_experts": _EXPERT_COUNT,
        "moe_args.top_k": _TOP_K,
        "num_shared_experts": "shared experts are the family's: model.config.n_shared_experts, as the family has it",
        "score_func": _SCORING,
        "route_norm": "model.config.norm_topk_prob",
        "route_scale": "model.config.routed_scaling_factor",
        "use_grouped_mm": _GROUPED,
        "load_balance_coeff": "model.router_bias_rate",
        "optimizer.name": "optim.name",
        "optimizer.lr": "optim.lr",
        "optimizer.eps": "optim.eps",
        "optimizer.weight_decay": "optim.weight_decay",
        "beta1": _BETAS,
        "beta2": _BETAS,
        "lr_scheduler.warmup_steps": "optim.schedule.warmup_steps",
        "lr_scheduler.decay_type": "optim.schedule.name",
        "decay_ratio": "optim.schedule.decay_steps, in steps",
        "min_lr_factor": "optim.schedule.final_ratio",
        "lr_min": "optim.schedule.final_ratio",
        "activation_checkpoint.mode": "memory.activation_checkpointing",
        "compile.enable": "memory.compile",
        "checkpoint.keep_latest_k": "checkpoint.keep",
        "checkpoint.folder": _OUTPUT,
        "metrics.log_freq": "track.every_steps",
        "enable_wandb": _WANDB,
        "hf_assets_path": "model.tokenizer, and model.weights for pretrained weights",
        "initial_load_path": "model.weights",
        "model.name": "model.family",
        "model.flavor": _MODEL,
        "validation.freq": "train.validate_every_steps",
        "job.dump_folder": _OUTPUT,
    }
)
_AXOLOTL = MappingProxyType(
    {
        "base_model": "model.weights",
        "base_model_config": "model.family and model.config",
        "datasets": _DATA,
        "datasets.path": _DATA,
        "pretraining_dataset": _DATA,
        "dataset_prepared_path": "data.root",
        "dataset_processes": "`meshwright prepare --workers N`",
        "val_set_size": "data.validation",
        "test_datasets": "data.validation, a share of data.sources from 0 to 0.5",
        "sample_packing": "data.pack",
        "pad_to_sequence_len": "sequences are packed and always full: data.pack",
        "excess_length_strategy": "documents are packed one after another, so none is too long",
        "num_epochs": _EPOCHS,
        "flash_attention": "model.attention, such as model.attention=flash_attention_2",
        "sdp_attention": "model.attention, such as model.attention=sdpa",
        "flex_attention": "model.attention, such as model.attention=flex_attention",
        "xformers_attention": "model.attention, such as model.attention=sdpa",
        "sequence_parallel_degree": "parallel.cp",
        "ring_attn_func": "parallel.context=ring, in zig-zag order",
        "heads_k_stride": "parallel.context=ring sends all heads at once",
        "unfrozen_parameters": "model.freeze, which names what is not trained",
        "saves_per_epoch": "checkpoint.every_steps",
        "evals_per_epoch": "train.validate_every_steps",
        "fsdp_config": _ZERO,
        "expert_parallel_size": "parallel.ep",
        "moe_kernels": _GROUPED,
        "adapter": _ADAPTERS,
        "peft": _ADAPTERS,
        **dict.fromkeys(
            ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear"), _ADAPTERS
        ),
        **dict.fromkeys(("load_in_4bit", "load_in_8bit", "gptq", "bnb_config_kwargs"), _QUANTIZED),
        **dict.fromkeys(("chat_template", "train_on_inputs", "roles_to_train", "field_messages"), _CHAT),
        **dict.fromkeys(("messages", "conversations", "conversation"), _CHAT),
        **dict.fromkeys(("rl", "rl_beta"), _PREFERENCES),
    }
)
_LLAMA_FACTORY = MappingProxyType(
    {
        "cutoff_len": "batch.context",
        "stage": "this version trains to predict the next token, which is stage pt; ZeRO's stage is zero.stage",
        "val_size": "data.validation",
        "dataset": _DATA,
        "eval_dataset": "data.validation, a share of data.sources from 0 to 0.5",
        "dataset_dir": _DATA,
        "tokenized_path": "data.root",
        "preprocessing_num_workers": "`meshwright prepare --workers N`",
        "neat_packing": "data.pack, such as data.pack=documents",
        "flash_attn": "model.attention, such as model.attention=flash_attention_2",
        "moe_aux_loss_coef": _AUX_LOSS,
        "plot_loss": "report.png in the run's folder has the curves",
        "finetuning_type": _ADAPTERS,
        "freeze_trainable_layers": "model.freeze",
        "template": _CHAT,
        "train_on_prompt": _CHAT,
        "mask_history": _CHAT,
        **dict.fromkeys(("lora_rank", "lora_target", "use_dora", "use_rslora"), _ADAPTERS),
        **dict.fromkeys(("quantization_bit", "quantization_method"), _QUANTIZED),
        **dict.fromkeys(("pref_beta", "pref_loss", "dpo_beta", "reward_model"), _PREFERENCES),
    }
)
_OTHERS = MappingProxyType(
    {
        **dict.fromkeys(
            ("router_aux_loss_coef", "aux_loss_alpha", "aux_loss_coef", "load_balancing_loss_coef"), _AUX_LOSS
        ),
        **dict.fromkeys(("router_z_loss_coef", "z_loss_coef", "moe_zloss_weight"), _NO_Z_LOSS),
        **dict.fromkeys(("num_experts", "n_experts", "num_local_experts", "n_routed_experts"), _EXPERT_COUNT),
        **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk"), _TOP_K),
        **dict.fromkeys(("capacity_factor", "moe_capacity_factor", "expert_capacity"), "model.expert_capacity"),
        "moe_intermediate_size": _EXPERT_WIDTH,
        "output_router_logits": "model.config.output_router_logits",
        "norm_topk_prob": "model.config.norm_topk_prob",
        "expert_parallel": "parallel.ep",
        **dict.fromkeys(
            ("ulysses_sequence_parallel_size", "ulysses_size", "ulysses_degree", "sp_ulysses_degree"), _ULYSSES
        ),
        **dict.fromkeys(
            ("ring_degree", "ring_size", "sp_ring_degree"), "parallel.context=[u, r], the ulysses and the ring degree"
        ),
        **dict.fromkeys(("sp_size", "sequence_parallel_world_size"), _ULYSSES),
        "context_parallel": "parallel.cp",
        "enable_expert_parallel": "parallel.ep, the number of ranks that divide the experts",
        "offload.optimizer": _OFFLOAD,
        "offload.parameters": _OFFLOAD,
        "offload.activations": _ACTIVATION_OFFLOAD,
        "enable_activation_offloading": _ACTIVATION_OFFLOAD,
        "activation_offload": _ACTIVATION_OFFLOAD,
        "cpu_offload": _OFFLOAD,
        "offload": _OFFLOAD,
        "offload_optimizer": _OFFLOAD,
        "offload_params": _OFFLOAD,
        "batch_size": _BATCH,
        "total_batch_size": "batch.tokens_per_step",
        "device_batch_size": "batch.sequences_per_microbatch",
        "accumulate_grad_batches": _ACCUMULATION,
        "grad_accum_steps": _ACCUMULATION,
        "gradient_accumulation": _ACCUMULATION,
        "gradient_clip_val": "optim.clip_norm",
        "grad_clip": "optim.clip_norm",
        "max_epochs": _EPOCHS,
        "epochs": _EPOCHS,
        "max_iters": "train.steps",
        "context_length": "batch.context",
        "sequence_length": "batch.context",
        "sequence_len": "batch.context",
        "num_gpus": "launch.ranks",
        "devices": "launch.ranks",
        "world_size": "launch.ranks",
        "precision": "precision.compute, or a recipe: precision=bf16",
        "scheduler": "optim.schedule.name, or a recipe: optim/schedule=wsd",
        "lr_scheduler": "optim.schedule.name, or a recipe: optim/schedule=wsd",
        "freeze_layers": "model.freeze",
        "pretrained_model_name_or_path": "model.weights",
        "random_seed": "train.seed",
        "out_dir": _OUTPUT,
    }
)


def foreign_names() -> Mapping[str, tuple[str, str]]:
    """name -> (whose name it is, our key or a sentence). Where two systems share a name the first one stands for both."""
    systems = {
        "HF Trainer": _HF_TRAINER,
        "DeepSpeed": _DEEPSPEED,
        "Megatron": _MEGATRON,
        "torchtitan": _TORCHTITAN,
        "axolotl": _AXOLOTL,
        "LLaMA-Factory": _LLAMA_FACTORY,
        "": _OTHERS,
    }
    table: dict[str, tuple[str, str]] = {}
    for system, names in systems.items():
        for name, ours in names.items():
            table.setdefault(name, (system, ours))
    return MappingProxyType(table)
