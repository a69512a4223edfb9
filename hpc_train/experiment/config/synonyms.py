"""Names of keys and values in other tools, and what to write here instead.

``keys`` and ``remedies`` read it to suggest replacements for unknown keys and values. Each target is a
key path of the schema, which a test checks.
"""

from __future__ import annotations

from hpc_train.experiment.config.problems import KeyPath, dotted

#: sbatch option → the equivalent key of the file.
SBATCH_KEYS = {
    "nodes": "slurm.nodes",
    "ntasks": "slurm.ranks_per_node",
    "ntasks-per-node": "slurm.ranks_per_node",
    "ntasks-per-gpu": "slurm.ranks_per_node",
    "gpus": "slurm.gpus_per_node",
    "gpus-per-node": "slurm.gpus_per_node",
    "gpus-per-task": "slurm.gpus_per_node",
    "gres": "slurm.gpus_per_node and slurm.gpu_type",
    "cpus-per-task": "slurm.cpus_per_gpu",
    "cpus-per-gpu": "slurm.cpus_per_gpu",
    "mem": "slurm.mem_gb",
    "mem-per-cpu": "slurm.mem_gb",
    "mem-per-gpu": "slurm.mem_gb",
    "time": "slurm.time_limit",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "exclude": "slurm.exclude",
    "reservation": "slurm.reservation",
    "dependency": "slurm.dependency",
    "mail-user": "slurm.mail",
    "mail-type": "slurm.mail",
    "container": "environment.container",
}

#: Key of the file → its names in other tools, wherever in the file they are written.
_ALSO_CALLED = {
    "name": "experiment experiment_name exp_name run_name job_name",
    "seed": "random_seed manual_seed rng_seed",
    "device": "cuda use_cuda accelerator device_type",
    "task": "task_name task_type problem_type objective",
    "model.name": "model_name model_type architecture arch backbone network net",
    "model.pretrained": (
        "weights model_weights pretrained_weights checkpoint_path ckpt_path pretrained_path finetune "
        "use_pretrained"
    ),
    "model.init_from": "load_from init_checkpoint init_weights finetune_from start_from warm_start",
    "model.lora": "peft lora_config peft_config adapter adapters",
    "model.freeze": "frozen freeze_layers frozen_layers freeze_backbone frozen_parameters",
    "model.args": "model_args model_kwargs model_config",
    "optimization.optimizer.groups": "param_groups parameter_groups paramwise_cfg lr_mult lr_groups",
    "model.args.drop_path_rate": "drop_path drop_path_rate stochastic_depth",
    "model.args.drop_rate": "drop_rate dropout dropout_rate",
    "data": "dataset datasets datamodule",
    "data.name": "dataset_name data_name",
    "data.root": "data_dir data_path data_root dataset_path dataset_dir root_dir data_folder train_dir",
    "data.args": "dataset_args dataset_kwargs data_args",
    "data.image_size": "img_size input_size resolution image_resolution crop_size train_size",
    "data.transform": "transforms train_transform train_transforms",
    "data.augment": "augmentation augmentations",
    "data.augment.hflip": "horizontal_flip random_horizontal_flip random_flip flip fliplr",
    "data.augment.vflip": "vertical_flip random_vertical_flip flipud",
    "data.augment.erasing": "random_erasing reprob random_erase",
    "data.augment.randaugment": "rand_augment",
    "data.augment.repeats": "repeated_augmentation repeated_aug repeat_aug aug_repeats ra_reps",
    "data.augment.policy": "aa auto_augment autoaugment trivial_augment trivialaugment",
    "data.normalize": "normalization",
    "data.normalize.mean": "image_mean",
    "data.normalize.std": "image_std",
    "data.workers": (
        "num_workers n_workers dataloader_workers dataloader_num_workers loader_workers workers_per_gpu "
        "num_data_workers"
    ),
    "optimization": "training train trainer hyperparameters training_arguments training_args fit",
    "optimization.epochs": "num_epochs n_epochs max_epochs num_train_epochs total_epochs train_epochs",
    "optimization.steps": (
        "max_steps num_steps total_steps train_steps num_train_steps n_steps max_iters iterations "
        "num_iterations max_iterations"
    ),
    "optimization.global_batch_size": (
        "batch_size train_batch_size total_batch_size effective_batch_size global_batch batchsize bs "
        "total_train_batch_size"
    ),
    "optimization.micro_batch_size": (
        "per_device_train_batch_size per_device_batch_size per_gpu_batch_size per_gpu_train_batch_size "
        "batch_size_per_gpu batch_size_per_device device_batch_size local_batch_size microbatch_size "
        "micro_batch microbatch train_micro_batch_size_per_gpu"
    ),
    "optimization.optimizer": "optim opt",
    "optimization.optimizer.name": "optimizer_name optimizer_type optim_type",
    "optimization.optimizer.lr": "learning_rate base_lr max_lr peak_lr init_lr initial_lr learningrate",
    "optimization.optimizer.weight_decay": "wd l2 weightdecay decay",
    "optimization.optimizer.args.betas": "betas adam_betas beta1 beta2 adam_beta1 adam_beta2 opt_betas",
    "optimization.optimizer.args.eps": "eps epsilon adam_epsilon opt_eps",
    "optimization.optimizer.args.nesterov": "nesterov",
    "optimization.schedule": "scheduler lr_scheduler lr_schedule sched",
    "optimization.schedule.name": "lr_scheduler_type schedule_type scheduler_name",
    "optimization.schedule.warmup_steps": "num_warmup_steps warmup_iters warmup_iterations",
    "optimization.schedule.warmup_epochs": "num_warmup_epochs warmup lr_warmup_epochs",
    "optimization.schedule.min_factor": "min_lr_ratio eta_min_ratio final_lr_factor",
    "optimization.clip_grad_norm": (
        "grad_clip gradient_clip_val gradient_clip gradient_clipping max_grad_norm clip_grad grad_norm_clip "
        "clip_norm max_norm clip_gradients grad_clip_norm"
    ),
    "optimization.loss": "criterion loss_fn loss_function loss_type",
    "optimization.label_smoothing": "smoothing label_smooth",
    "optimization.ema": "model_ema use_ema",
    "optimization.ema.decay": "ema_decay model_ema_decay",
    "optimization.mixup": "mixup_alpha",
    "optimization.cutmix": "cutmix_alpha",
    "optimization.cutmix_probability": "mixup_switch_prob switch_prob",
    "parallel": "distributed parallelism fsdp_config deepspeed",
    "parallel.strategy": "distributed_strategy parallel_strategy ddp fsdp zero_stage zero_optimization",
    "parallel.tensor": "tensor_parallel tensor_parallel_size tensor_parallel_degree tp tp_size",
    "parallel.pipeline": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp pp_size",
    "parallel.sync_batchnorm": "sync_bn syncbn sync_batch_norm",
    "precision": "amp use_amp mixed_precision dtype torch_dtype fp16 bf16 half half_precision autocast",
    "compile": "torch_compile compile_model use_compile",
    "activation_checkpointing": (
        "gradient_checkpointing grad_checkpointing checkpoint_activations activation_checkpoint remat"
    ),
    "evaluation": "eval val validation evaluate",
    "evaluation.every_epochs": "check_val_every_n_epoch eval_every_epochs val_every eval_epochs",
    "evaluation.every_steps": (
        "eval_steps eval_interval eval_every eval_freq val_check_interval val_interval eval_every_steps"
    ),
    "checkpoint": "checkpoints checkpointing saving",
    "checkpoint.every_steps": "save_steps save_interval save_every save_freq checkpoint_every ckpt_interval",
    "checkpoint.every_min": "save_every_min checkpoint_interval",
    "checkpoint.best": "save_best save_best_only load_best_model_at_end keep_best",
    "checkpoint.best.metric": "metric_for_best_model monitor_metric",
    "early_stopping": "earlystopping early_stop",
    "early_stopping.patience": "early_stopping_patience",
    "early_stopping.min_delta": "early_stopping_threshold",
    "checkpoint.keep": "save_total_limit keep_last max_to_keep keep_checkpoints save_top_k",
    "slurm": "cluster sbatch scheduler_options resources",
    "slurm.nodes": "num_nodes n_nodes nnodes",
    "slurm.gpus_per_node": "num_gpus n_gpus ngpus n_gpu gpu gpu_count gpus_per_job",
    "slurm.ranks_per_node": (
        "tasks_per_node ranks num_ranks world_size nproc_per_node num_processes processes nprocs "
        "num_tasks n_tasks"
    ),
    "slurm.cpus_per_gpu": "cpus num_cpus cores ncpus cpus_per_node cpu_count",
    "slurm.mem_gb": "memory mem_per_node ram memory_gb",
    "slurm.time_limit": "walltime timeout timeout_min time_min wall_time max_time hours",
    "slurm.partition": "queue",
    "slurm.mail": "email",
    "environment": "env",
    "environment.python": "venv virtualenv conda conda_env python_path interpreter python_executable",
    "environment.modules": "module module_load lmod",
    "environment.container": "singularity apptainer image container_image sif",
    "sweep.grid": "hyperparameter_sweep param_grid search_space",
    "sweep.random": "random_search",
    "sweep.search": "optuna hyperparameter_search hyperopt",
    "logging.every_steps": (
        "log_every log_interval logging_steps log_steps log_freq log_every_n_steps print_freq print_every"
    ),
    "logging.wandb": "use_wandb weights_and_biases",
    "logging.wandb.project": "wandb_project",
    "logging.wandb.entity": "wandb_entity",
    "logging.mlflow": "use_mlflow ml_flow",
    "logging.mlflow.tracking_uri": "mlflow_tracking_uri mlflow_uri",
    "logging.mlflow.experiment": "mlflow_experiment",
    "logging.tensorboard": "use_tensorboard tensorboard",
    "logging.loggers": "logger report_to",
}
#: Section → key → names that mean something else in other sections. 0 stands for any item of a list.
_WITHIN: dict[KeyPath, dict[str, str]] = {
    ("model",): {"name": "type id class kind model", "pretrained": "checkpoint path file"},
    ("data",): {"name": "type id class kind", "root": "path dir folder location", "image_size": "size"},
    ("optimization", "optimizer"): {"name": "type class kind algorithm", "lr": "rate"},
    ("optimization", "optimizer", "groups", 0): {
        "match": "params parameters names name pattern patterns",
        "lr_factor": "lr learning_rate lr_mult lr_scale lr_multiplier factor",
        "weight_decay": "wd weightdecay decay",
    },
    ("optimization", "schedule"): {"name": "type class kind policy"},
    ("checkpoint",): {"every_min": "interval_min minutes", "every_steps": "interval steps frequency"},
    ("evaluation",): {"every_steps": "interval steps frequency", "every_epochs": "epochs"},
    ("parallel",): {"strategy": "type name kind"},
    ("slurm",): {"mail": "mail_user mail_type"},
}
#: Names in other tools without an equivalent key → what to do instead.
_ADVICE = {
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches accumulate_gradients "
    "grad_accum_steps grad_accumulation_steps grad_accum accumulation_steps accumulation grad_accumulation "
    "num_accumulation_steps update_freq": (
        "write optimization.global_batch_size and micro_batch_size; gradient accumulation follows from them: "
        "global_batch_size / (micro_batch_size × ranks) steps"
    ),
    "devices num_devices n_devices": "write slurm.gpus_per_node, or start with --local --devices N",
    "num_classes n_classes classes nclasses": (
        "take it out; it comes from the data set, and model.args.num_classes overrides it"
    ),
    "min_lr eta_min end_lr": "write optimization.schedule.min_factor, the final rate as a fraction of lr",
    "warmup_ratio warmup_fraction": "write optimization.schedule.warmup_steps or warmup_epochs",
    "resume resume_from resume_from_checkpoint auto_resume": (
        "take it out; submitting the same file again, or `hpc-train resume RUN`, continues a run"
    ),
    "output_dir out_dir save_dir log_dir output default_root_dir checkpoint_dir ckpt_dir run_dir": (
        "take it out; runs are written to ./runs, or where the environment variable HPC_TRAIN_RUNS says"
    ),
    "metrics": "take it out; the task defines the metrics (docs/plugins.md)",
    "script command entrypoint main train_script": (
        "write program: {command: [python, train.py]} for a training script of your own, in place of task, "
        "model, data and optimization"
    ),
    "pin_memory persistent_workers prefetch_factor shuffle drop_last": (
        "take it out; the loader handles this automatically, and data.workers is the number of its processes"
    ),
    "find_unused_parameters": "write parallel.args.find_unused_parameters",
    "num_samples": "write data.args.num_samples",
}
#: Key of the file → its value → the value's names in other tools.
_VALUES: dict[str, dict[str, str]] = {
    "device": {"cuda": "gpu gpus nvidia"},
    "precision": {
        "fp32": "32 float float32 32_true full high highest",
        "bf16": "bfloat16 bf16_mixed bf16_true mixed amp mixed_bf16",
        "fp16": "16 float16 half 16_mixed fp16_mixed mixed_fp16",
        "fp64": "64 double float64 64_true",
        "tf32": "tensorfloat32",
        "fp8": "8 float8 e4m3",
    },
    "parallel.strategy": {
        "ddp": "dp data_parallel none single auto distributed_data_parallel horovod",
        "fsdp": "fsdp2 zero3 zero_3 full_shard fully_sharded deepspeed fully_sharded_data_parallel",
        "zero2": "zero_2 shard_grad_op deepspeed_stage_2",
        "zero1": "zero zero_1 deepspeed_stage_1",
        "hsdp": "hybrid_shard",
        "tensor": "tp tensor_parallel",
        "pipeline": "pp pipeline_parallel",
    },
    "task": {
        "classification": "image_classification classify cls classifier",
        "causal_lm": "lm language_modeling language_model clm text_generation pretraining",
    },
    "optimization.schedule.name": {
        "cosine": "cosine_annealing cosineannealing cos cosine_with_warmup cosine_decay",
        "constant": "none fixed const constant_with_warmup",
        "step": "steplr step_lr",
        "poly": "polynomial",
    },
    "activation_checkpointing": {"blocks": "full all", "off": "none"},
    "compile.mode": {"max-autotune": "max_autotune", "reduce-overhead": "reduce_overhead"},
    "parallel.schedule": {"1f1b": "one_f_one_b pipedream", "interleaved": "interleaved_1f1b"},
    "logging.wandb.mode": {"offline": "dryrun disabled"},
}


def _table(also_called: dict[str, str]) -> dict[str, str]:
    return {name: key for key, names in also_called.items() for name in names.split()}


KEYS = {option.replace("-", "_"): key for option, key in SBATCH_KEYS.items()} | _table(_ALSO_CALLED)
KEYS_WITHIN = {section: _table(keys) for section, keys in _WITHIN.items()}
ADVICE = {name: advice for names, advice in _ADVICE.items() for name in names.split()}
VALUES = {key: _table(values) for key, values in _VALUES.items()}


def key_for(path: KeyPath) -> str | None:
    """Return the dotted key (or two keys: ``a and b``) that is equivalent to the unknown key ``path``."""
    if beside := key_beside(path):
        return dotted((*path[:-1], beside))
    return KEYS.get(_plain(path[-1]))


def key_beside(path: KeyPath) -> str | None:
    """Return the key of the same section that is equivalent to the unknown key ``path``."""
    section = tuple(0 if isinstance(segment, int) else segment for segment in path[:-1])
    return KEYS_WITHIN.get(section, {}).get(_plain(path[-1]))


def advice_for(path: KeyPath) -> str | None:
    """Return what to do instead of writing ``path``, where no key is equivalent."""
    return ADVICE.get(_plain(path[-1]))


def value_for(path: KeyPath, value: object) -> str | None:
    """Return the value of the key ``path`` that other tools call ``value``."""
    if isinstance(value, bool | dict | list) or value is None:
        return None
    plain = _plain(value)
    if path == ("device",):
        plain = plain.partition(":")[0]
    choices = VALUES.get(".".join(map(str, path)), {})
    return plain if plain in choices.values() else choices.get(plain)


def _plain(name: object) -> str:
    return str(name)[:100].lower().replace("-", "_").replace(" ", "_")
