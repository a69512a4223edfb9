"""Names of keys and values in other tools, with the equivalent here.

The tools are Lightning, Hugging Face, timm, torch, torchrun, Hydra, mmengine, detectron2 and Keras. ``keys``,
``translations`` and ``remedies`` read the tables to suggest replacements for unknown keys and values. Each
target is a key path of the schema, which a test checks.
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
    "mail-user": "slurm.mail",
    "mail-type": "slurm.mail",
    "container": "environment.container",
} | {
    name: f"slurm.{name}"
    for name in ("partition", "account", "qos", "constraint", "exclude", "reservation", "dependency")
}

#: Key of the file → its names in other tools, wherever in the file they are written.
_ALSO_CALLED = {
    "name": "experiment experiment_name exp_name run_name job_name",
    "seed": "random_seed manual_seed rng_seed seed_everything",
    "device": "cuda use_cuda no_cuda accelerator device_type",
    "task": "task_name task_type problem_type objective",
    "model.name": "model_name model_type model_name_or_path architecture arch backbone network net",
    "model.pretrained": (
        "weights model_weights pretrained_weights checkpoint_path ckpt_path pretrained_path finetune "
        "use_pretrained"
    ),
    "model.init_from": (
        "load_from init_checkpoint initial_checkpoint init_weights finetune_from start_from warm_start"
    ),
    "model.lora": "peft lora_config peft_config adapter adapters",
    "model.freeze": "frozen freeze_layers frozen_layers freeze_backbone frozen_parameters",
    "model.args": "model_args model_kwargs model_config",
    "optimization.optimizer.groups": "param_groups parameter_groups paramwise_cfg lr_mult lr_groups",
    "model.args.drop_path_rate": "drop_path drop_path_rate stochastic_depth",
    "model.args.drop_rate": "drop_rate dropout dropout_rate",
    "data": "dataset datasets datamodule",
    "data.name": "dataset_name data_name",
    "data.root": (
        "data_dir data_path data_root dataset_path dataset_dir root_dir data_folder train_dir data_prefix"
    ),
    "data.args": "dataset_args dataset_kwargs data_args",
    "data.image_size": "img_size imgsz input_size resolution image_resolution crop_size train_size",
    "data.eval_crop": "crop_pct center_crop",
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
    "optimization": (
        "training train trainer hyperparameters training_arguments training_args fit hparams solver"
    ),
    "optimization.epochs": "num_epochs n_epochs max_epochs num_train_epochs total_epochs train_epochs",
    "optimization.steps": (
        "max_steps num_steps total_steps train_steps num_train_steps n_steps max_iters iterations "
        "num_iterations max_iterations max_iter"
    ),
    "optimization.global_batch_size": (
        "batch_size train_batch_size total_batch_size effective_batch_size global_batch batchsize bs "
        "total_train_batch_size ims_per_batch"
    ),
    "optimization.micro_batch_size": (
        "per_device_train_batch_size per_device_batch_size per_gpu_batch_size per_gpu_train_batch_size "
        "batch_size_per_gpu batch_size_per_device device_batch_size local_batch_size microbatch_size "
        "micro_batch microbatch train_micro_batch_size_per_gpu"
    ),
    "optimization.optimizer": "optim opt optim_wrapper",
    "optimization.optimizer.name": "optimizer_name optimizer_type optim_type",
    "optimization.optimizer.lr": "learning_rate base_lr max_lr peak_lr init_lr initial_lr learningrate lr0",
    "optimization.optimizer.weight_decay": "wd l2 weightdecay decay",
    "optimization.optimizer.args.betas": "betas adam_betas beta1 beta2 adam_beta1 adam_beta2 opt_betas",
    "optimization.optimizer.args.eps": "eps epsilon adam_epsilon opt_eps",
    "optimization.optimizer.args.nesterov": "nesterov",
    "optimization.schedule": "scheduler lr_scheduler lr_schedule sched param_scheduler",
    "optimization.schedule.name": "lr_scheduler_type schedule_type scheduler_name lr_scheduler_name",
    "optimization.schedule.warmup_steps": "num_warmup_steps warmup_iters warmup_iterations",
    "optimization.schedule.warmup_epochs": "num_warmup_epochs warmup lr_warmup_epochs warmup_t",
    "optimization.schedule.min_factor": "min_lr_ratio eta_min_ratio final_lr_factor",
    "optimization.clip_grad_norm": (
        "grad_clip gradient_clip_val gradient_clip gradient_clipping max_grad_norm clip_grad grad_norm_clip "
        "clip_norm max_norm clip_gradients grad_clip_norm"
    ),
    "optimization.loss": "criterion loss_fn loss_function loss_type",
    "optimization.label_smoothing": "smoothing label_smooth label_smoothing_factor",
    "optimization.ema": "model_ema use_ema swa",
    "optimization.ema.decay": "ema_decay model_ema_decay",
    "optimization.mixup": "mixup_alpha",
    "optimization.cutmix": "cutmix_alpha",
    "optimization.cutmix_probability": "mixup_switch_prob switch_prob",
    "parallel": "distributed parallelism fsdp_config",
    "parallel.strategy": (
        "distributed_strategy parallel_strategy ddp fsdp deepspeed zero_stage zero_optimization"
    ),
    "parallel.tensor": "tensor_parallel tensor_parallel_size tensor_parallel_degree tp tp_size",
    "parallel.pipeline": "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp pp_size",
    "parallel.sync_batchnorm": "sync_bn syncbn sync_batch_norm",
    "precision": (
        "amp use_amp mixed_precision dtype torch_dtype fp16 bf16 tf32 fp8 half half_precision autocast "
        "amp_dtype use_fp16 use_bf16"
    ),
    "compile": "torch_compile torchcompile compile_model use_compile",
    "activation_checkpointing": (
        "gradient_checkpointing grad_checkpointing checkpoint_activations activation_checkpoint remat"
    ),
    "evaluation": "eval val validation evaluate",
    "evaluation.every_epochs": (
        "check_val_every_n_epoch eval_every_epochs eval_every_n_epochs val_every eval_epochs"
    ),
    "evaluation.every_steps": (
        "eval_steps eval_interval eval_every eval_freq val_check_interval val_interval eval_every_steps "
        "eval_every_n_steps"
    ),
    "checkpoint": "checkpoints checkpointing saving",
    "checkpoint.every_steps": (
        "save_steps save_interval save_every save_freq checkpoint_every ckpt_interval checkpoint_period "
        "every_n_train_steps"
    ),
    "checkpoint.every_min": "save_every_min checkpoint_interval",
    "checkpoint.best": "save_best save_best_only load_best_model_at_end keep_best",
    "checkpoint.best.metric": "metric_for_best_model monitor_metric monitor",
    "early_stopping": "earlystopping early_stop",
    "early_stopping.patience": "early_stopping_patience",
    "early_stopping.min_delta": "early_stopping_threshold",
    "checkpoint.keep": "save_total_limit keep_last max_to_keep keep_checkpoints save_top_k",
    "slurm": "cluster sbatch scheduler_options resources submitit launcher",
    "slurm.nodes": "num_nodes n_nodes nnodes",
    "slurm.spare_nodes": "spares num_spares hot_spares standby_nodes extra_nodes",
    "slurm.gpus_per_node": (
        "num_gpus n_gpus ngpus n_gpu gpu gpu_count gpus_per_job devices num_devices n_devices"
    ),
    "slurm.ranks_per_node": (
        "tasks_per_node ranks num_ranks world_size nproc_per_node nproc num_processes processes nprocs "
        "num_tasks n_tasks"
    ),
    "slurm.cpus_per_gpu": "cpus num_cpus cores ncpus cpus_per_node cpu_count",
    "slurm.mem_gb": "memory mem_per_node ram memory_gb",
    "slurm.time_limit": "walltime timeout timeout_min time_min wall_time max_time hours",
    "slurm.partition": "queue",
    "slurm.mail": "email",
    "environment": "env environ",
    "environment.python": "venv virtualenv conda conda_env python_path interpreter python_executable",
    "environment.modules": "module module_load lmod",
    "environment.container": "singularity apptainer image container_image sif",
    "sweep.grid": "hyperparameter_sweep param_grid search_space sweeps multirun",
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
    "logging": "logger loggers report_to log_with",
    "parallel.args.find_unused_parameters": "find_unused_parameters ddp_find_unused_parameters",
}
#: Section → key → names that mean something else in other sections. 0 stands for any item of a list.
_WITHIN: dict[KeyPath, dict[str, str]] = {
    ("model",): {
        "name": "type id class kind model _target_ class_path",
        "pretrained": "checkpoint path file",
        "args": "kwargs params init_args options config",
    },
    ("data",): {
        "name": "type id class kind _target_ class_path dataset source",
        "root": "path dir folder location train train_path training data_root",
        "image_size": "size",
        "args": "kwargs params init_args options",
    },
    ("model", "lora"): {
        "rank": "r lora_r lora_rank",
        "targets": "target_modules modules target",
        "alpha": "lora_alpha",
        "also_train": "modules_to_save",
    },
    ("optimization",): {"epochs": "max_epoch", "clip_grad_norm": "clip grad_norm"},
    ("optimization", "optimizer"): {
        "name": "type class kind algorithm _target_ class_path",
        "lr": "rate",
        "args": "kwargs params init_args options",
    },
    ("optimization", "optimizer", "groups", 0): {
        "match": "params parameters names name pattern patterns",
        "lr_factor": "lr learning_rate lr_mult lr_scale lr_multiplier factor",
        "weight_decay": "wd weightdecay decay",
    },
    ("optimization", "schedule"): {
        "name": "type class kind policy _target_ class_path",
        "min_factor": "min_lr_factor final_factor eta_min_factor",
        "args.every_epochs": "step_size decay_epochs decay_every",
        "args.every_steps": "step decay_steps",
        "args.gamma": "decay_rate decay",
        "args.milestones_epochs": "milestones decay_milestones",
        "args": "kwargs params init_args options",
    },
    ("optimization", "loss"): {
        "name": "type class kind _target_ class_path",
        "args.class_weights": "weight weights",
        "args": "kwargs params init_args options",
    },
    ("checkpoint",): {
        "every_min": "interval_min minutes train_time_interval",
        "every_steps": "interval steps frequency every_n_steps",
        "keep": "max_keep_ckpts max_keep_checkpoints save_last_k",
        "best.metric": "monitor metric",
        "best.mode": "mode",
    },
    ("evaluation",): {
        "every_steps": "interval steps frequency every_n_steps",
        "every_epochs": "epochs every every_n_epochs",
    },
    ("logging",): {"every_steps": "every"},
    ("early_stopping",): {
        "metric": "monitor metric_name",
        "mode": "direction",
        "min_delta": "threshold delta tolerance",
    },
    ("checkpoint", "best"): {"metric": "monitor metric_name name", "mode": "direction goal"},
    ("parallel",): {"strategy": "type name kind stage zero_stage"},
    ("logging", "wandb"): {"project": "project_name name", "entity": "team org organization user"},
    ("logging", "mlflow"): {"tracking_uri": "uri url server", "experiment": "experiment_name name"},
    ("slurm",): {"mail": "mail_user mail_type"},
    ("sweep",): {
        "search": "optuna bayes bayesian tpe",
        "max_parallel": "n_jobs num_workers max_concurrent parallel concurrency array_parallelism",
    },
    ("sweep", "random"): {
        "count": "runs num_runs n num n_runs trials n_trials num_trials num_samples samples"
    },
    ("program",): {
        "command": "cmd script entrypoint entry_point run main exec executable train_script",
        "env": "environment environ vars variables env_vars envs",
        "outputs": "output output_dir out_dir out output_folder save_dir writes",
        "args": "arguments options params parameters kwargs flags argv",
        "per": "start_per launch_per",
        "metrics": "metric",
        "kill_after_s": "grace_s grace_period kill_after timeout_s",
        "resume": "restart on_restart",
    },
    ("program", "resume"): {
        "if_exists": "checkpoint ckpt checkpoint_path path file exists if_exist when from",
        "args": "arguments options flags with add",
    },
    ("program", "metrics"): {
        "regex": "pattern regexp re expression",
        "jsonl": "file json path json_lines",
    },
    ("sweep", "search"): {
        "trials": "count runs num_runs n n_trials num_trials num_samples max_trials",
        "method": "sampler algorithm",
        "max_concurrent": "n_jobs max_parallel parallel",
        "mode": "direction goal",
    },
}
#: Options of sbatch without a key, which belong into ``slurm.extra``.
_EXTRA = (
    "exclusive nodelist licenses comment hint tmp switches begin deadline distribution gpu_bind cpu_bind "
    "mem_bind network nice wckey priority oversubscribe contiguous threads_per_core prefer"
)
#: Section → arguments that belong into its ``args``.
_ARGUMENTS: dict[KeyPath, str] = {
    ("model",): (
        "in_chans img_size global_pool attn_drop_rate drop_path_rate embed_dim depth patch_size num_layers "
        "num_heads num_kv_heads dim hidden_dim tie_embeddings encoder_name encoder_depth"
    ),
    ("data",): "channels sequence_length target config revision image_column target_column num_samples",
    ("optimization", "optimizer"): (
        "betas eps nesterov amsgrad dampening alpha rho centered fused foreach maximize capturable "
        "lr_decay etas "
        "ns_steps lambd t0 momentum_decay decoupled_weight_decay initial_accumulator_value trust_clip"
    ),
    ("optimization", "schedule"): "gamma power every_epochs every_steps milestones_epochs milestones_steps",
    ("optimization", "loss"): "gamma class_weights pos_weight delta cross_entropy dice",
}
#: Names in other tools without an equivalent key → the advice.
_ADVICE = {
    "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches accumulate_gradients "
    "grad_accum_steps grad_accumulation_steps grad_accum accumulation_steps accumulation grad_accumulation "
    "num_accumulation_steps update_freq": (
        "take it out; gradient accumulation follows from optimization.global_batch_size: it is "
        "global_batch_size / (micro_batch_size × ranks) steps"
    ),
    "num_classes n_classes classes nclasses num_labels id2label": (
        "take it out; it comes from the data set, and model.args.num_classes overrides it"
    ),
    "min_lr eta_min end_lr lr_end final_lr": (
        "write optimization.schedule.min_factor: 0.01; it is the final rate as a fraction of lr"
    ),
    "warmup_ratio warmup_fraction warmup_factor": (
        "write optimization.schedule.warmup_epochs: 1; it may be a fraction of an epoch"
    ),
    "t_max t_0 t_mult last_epoch cooldown_epochs decay_t total_iters by_epoch begin end": (
        "take it out; a schedule ends with the run"
    ),
    "every_n_epochs save_every_n_epochs save_epochs save_interval_epochs": (
        "write checkpoint.every_min: 10; checkpoints are saved by time or by steps, not by epochs"
    ),
    "save_strategy save_last save_on_train_epoch_end save_weights_only save_only_model": (
        "take it out; checkpoints are saved every 10 minutes and at the end, see checkpoint.every_steps"
    ),
    "eval_strategy evaluation_strategy eval_on_start do_eval do_train num_sanity_val_steps": (
        "take it out; the validation data are evaluated after each epoch, see evaluation.every_steps"
    ),
    "greater_is_better": "write checkpoint.best: {metric: accuracy, mode: max}",
    "callbacks default_hooks custom_hooks hooks": (
        "take it out; early_stopping, checkpoint, optimization.ema and logging are sections of the file"
    ),
    "restore_best_weights": "write checkpoint.best: {metric: accuracy, mode: max}",
    "validation_split val_split val_fraction test_size": (
        "take it out; the data set has a validation part of its own, for imagefolder the folder val"
    ),
    "defaults hydra _convert_ _recursive_": (
        "take it out; the file is complete in itself, and KEY=VALUE on the command line changes a key"
    ),
    "requeue open_mode signal": "take it out; jobs are requeued automatically, see the section recovery",
    "array": "take it out; a sweep starts its runs as a job array",
    "error stdout stderr": (
        "take it out; the logs are in the run folder, and `hpc-train logs RUN` prints them"
    ),
    "master_addr master_port rdzv_backend rdzv_endpoint rdzv_id node_rank local_rank dist_backend dist_url "
    "init_method": "take it out; the ranks find one another",
    "push_to_hub hub_model_id hub_token": "take it out; `hpc-train export RUN` writes the weights to a file",
    "fast_dev_run limit_train_batches limit_val_batches overfit_batches steps_per_epoch": (
        "write optimization.steps: 10 in place of epochs"
    ),
    "benchmark cudnn_benchmark enable_progress_bar enable_checkpointing enable_model_summary disable_tqdm "
    "verbose progress_bar lr_monitor log_model remove_unused_columns overwrite_output_dir": (
        "take it out; nothing needs it here"
    ),
    "download": "take it out; `hpc-train prepare` downloads the data",
    "seeds": "write sweep.grid: {seed: [0, 1, 2]}",
    "resume resume_from resume_from_checkpoint auto_resume": (
        "take it out; submitting the same file again, or `hpc-train resume RUN`, continues a run"
    ),
    "output_dir out_dir save_dir log_dir output default_root_dir checkpoint_dir ckpt_dir run_dir": (
        "take it out; runs are written to ./runs, or where the environment variable HPC_TRAIN_RUNS says"
    ),
    "metrics eval_metric eval_metrics": "take it out; the task defines the metrics (docs/plugins.md)",
    "script command entrypoint main train_script": (
        "write program: {command: [python, train.py]} for a training script of your own, in place of task, "
        "model, data and optimization"
    ),
    "pin_memory persistent_workers prefetch_factor shuffle drop_last": (
        "take it out; the loader handles this automatically, and data.workers is the number of its processes"
    ),
}
#: Section → names without a meaning in it → the advice.
_ADVICE_WITHIN: dict[KeyPath, dict[str, str]] = {
    ("data",): {
        "val val_path validation test test_path val_dir test_dir valid eval": (
            "take it out; data.root contains the training and the validation data"
        ),
    },
    ("sweep",): {
        "method program name goal early_terminate command": (
            "take it out; grid, list, random and search are sections of sweep"
        ),
        "metric": "take it out; sweep.search has its metric",
    },
    ("sweep", "search"): {"storage study_name": "take it out; the run folders keep the results"},
    ("compile",): {"backend": "take it out; the backend is inductor"},
    ("environment",): {
        "env variables vars env_vars environment": (
            "take it out; variables for all jobs belong in a site profile (docs/cluster.md)"
        ),
    },
    ("slurm",): {"output error": "take it out; the logs are in the run folder, see `hpc-train logs RUN`"},
}


def table_of(also_called: dict[str, str]) -> dict[str, str]:
    """Return name → key, from key → names separated by blanks."""
    return {name: key for key, names in also_called.items() for name in names.split()}


def _table_of_advice(table: dict[str, str]) -> dict[str, str]:
    return {name: advice for names, advice in table.items() for name in names.split()}


KEYS = {option.replace("-", "_"): key for option, key in SBATCH_KEYS.items()} | table_of(_ALSO_CALLED)
KEYS_WITHIN = {section: table_of(keys) for section, keys in _WITHIN.items()}
ADVICE = _table_of_advice(_ADVICE)
ADVICE_WITHIN = {section: _table_of_advice(table) for section, table in _ADVICE_WITHIN.items()}


def key_for(path: KeyPath) -> str | None:
    """Return the dotted key (or two keys: ``a and b``) that is equivalent to the unknown key ``path``."""
    if beside := key_beside(path):
        return dotted((*path[:-1], *beside.split(".")))
    return None if advice_within(path) else KEYS.get(_plain(path[-1]))


def key_beside(path: KeyPath) -> str | None:
    """Return the key, relative to the same section, that is equivalent to the unknown key ``path``."""
    section = tuple(0 if isinstance(segment, int) else segment for segment in path[:-1])
    name = _plain(path[-1])
    if section == ("slurm",) and name in _EXTRA.split():
        return f"extra.{name.replace('_', '-')}"
    if name in _ARGUMENTS.get(section, "").split():
        return f"args.{name}"
    return KEYS_WITHIN.get(section, {}).get(name)


def argument_for(section: KeyPath, name: str) -> str | None:
    """Return the argument in the ``args`` of ``section`` that other tools call ``name``."""
    called, args = key_for((*section, name)) or "", f"{dotted(section)}.args."
    return called.removeprefix(args) if called.startswith(args) else None


def advice_for(path: KeyPath) -> str | None:
    """Return the advice for ``path`` if no key is equivalent."""
    return advice_within(path) or ADVICE.get(_plain(path[-1]))


def advice_within(path: KeyPath) -> str | None:
    """Return the advice for ``path`` if it has no meaning in its section."""
    return ADVICE_WITHIN.get(path[:-1], {}).get(_plain(path[-1]))


def _plain(name: object) -> str:
    return str(name)[:100].lower().replace("-", "_").replace(" ", "_")
