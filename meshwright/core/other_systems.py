"""Maps modes and options of other systems to ours (`docs/how-to/come-from-mindspore.md`)."""

from __future__ import annotations

CALLED_HERE = {
    "auto_parallel": (
        'mode="auto" with cluster=, or one of the searches by its name',
        "how-to/plan-for-a-cluster.md",
    ),
    **dict.fromkeys(
        ("compile", "torch_compile"), ("mw.train_step(…, compile=True), under any plan", "how-to/compile.md")
    ),
    "semi_auto_parallel": ('mode="semi_auto"', "how-to/come-from-mindspore.md"),
    "hybrid_parallel": (
        'a model that shards itself: mw.world(mesh), and mw.manual_step(…, local_parameters=("experts.*",))',
        "how-to/come-from-mindspore.md",
    ),
    "layerwise_parallel": (
        'mw.manual_step(…, local_parameters=("experts.*",))',
        "how-to/come-from-mindspore.md",
    ),
    "expert_parallel": (
        'pins={"*.experts": {"g": "ep"}} shards experts over the axis "ep", or mode="auto"',
        "how-to/come-from-mindspore.md",
    ),
    "context_parallel": (
        'mw.reshard(x, layout("dp", "sp", None)) splits the sequence',
        "how-to/come-from-mindspore.md",
    ),
    "sequence_parallel": (
        'mw.reshard(x, layout("dp", "sp", None)) splits the sequence',
        "how-to/come-from-mindspore.md",
    ),
    "seqpipe": (
        "pipelines over parts of the sequence are not supported; use pipeline=2, micro_batches=8 and schedule=",
        "how-to/train-in-a-pipeline.md",
    ),
    "pipeline_stages": ("pipeline=2, micro_batches=4", "how-to/train-in-a-pipeline.md"),
    "pipeline_parallel": ("pipeline=2, micro_batches=4", "how-to/train-in-a-pipeline.md"),
    "tensor_parallel": (
        'mesh={"dp": 2, "tp": 2}, mode="sharding_propagation" and pins={"blocks.*.up": {"n": "tp"}}, or mode="auto"',
        "how-to/plan-for-a-cluster.md",
    ),
    "full_batch": (
        "leave it out: pass the global batch on every rank, or use mw.shard_loader, which reads each rank's shard",
        "how-to/feed-data.md",
    ),
    "dataset_strategy": ("mw.shard_loader(loader, step)", "how-to/feed-data.md"),
    "enable_alltoall": (
        "leave it out: an all-to-all is used where it is the cheapest",
        "how-to/come-from-mindspore.md",
    ),
    "parameter_server": (
        'mw.train_step(…, mode="parameter_server") or mw.parameter_server(…), with mw.on_server(table)',
        "how-to/use-parameter-servers.md",
    ),
    "zero": ("optimizer_parallel=1, 2 or 3", "reference/techniques.md"),
    "fsdp": ("optimizer_parallel=3", "reference/techniques.md"),
    "ddp": ('mode="data_parallel", the default', "how-to/come-from-mindspore.md"),
    "comm_fusion": ('fusion="auto", or bytes of a bucket', "reference/techniques.md"),
    "gradients_mean": (
        'leave it out: gradients are those of one device; gradients="sum" adds them up',
        "reference/techniques.md",
    ),
}


# What loops elsewhere call on a model, an optimizer or a trainer, and what a step has for it.
OF_A_STEP = {
    **dict.fromkeys(
        ("evaluate", "eval", "predict"),
        "step.forward_step(model, batch) evaluates on the trained weights; model.eval() switches modes",
    ),
    **dict.fromkeys(("backward", "zero_grad"), "leave it out: step(batch) is forward, backward and update"),
    "train": "model.train(); step(batch) follows the mode of the model",
    **dict.fromkeys(
        ("state_dict", "get_state_dict"), "step.full_state(), or step.save(path) for a checkpoint"
    ),
    **dict.fromkeys(
        ("model", "unwrap_model", "get_model"), "with step.full() as model: … has the trained values"
    ),
    "named_parameters": "step.parameters: name → this rank's shard; step.full_state() has full tensors",
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_norm"), "mw.train_step(…, clip_norm=1.0), then step.grad_norm"
    ),
    **dict.fromkeys(
        ("save_model", "save_checkpoint"), "step.save(path); step.save_pretrained(folder) for Hugging Face"
    ),
    **dict.fromkeys(("load_checkpoint", "restore"), "step.load(path), or step.resume(path)"),
}


# What a training step has, and loops elsewhere call, and what a step with parameters on servers has for it.
OF_A_SERVER_STEP = {
    **dict.fromkeys(
        ("forward_step", "eval", "predict"), "step.evaluate(batch), or call the model outside of a step"
    ),
    **dict.fromkeys(("backward", "zero_grad"), "leave it out: step(batch) is forward, backward and push"),
    **dict.fromkeys(
        ("full", "module", "state_dict", "get_state_dict", "save_pretrained", "copy_to"),
        "step.full_state(), or model.state_dict() outside of a step",
    ),
    **dict.fromkeys(("parameters", "named_parameters"), "step.full_state() has full tensors"),
    **dict.fromkeys(
        ("no_sync", "micro_batches", "accumulate"), "a larger batch: a step on servers does not accumulate"
    ),
    **dict.fromkeys(
        ("clip_grad_norm_", "clip_grad_norm"), "mw.parameter_server(…, clip_norm=1.0), then step.grad_norm"
    ),
    **dict.fromkeys(
        ("gradient_norms", "gradients"),
        "step.grad_norm, with clip_norm=; gradients themselves are pushed to servers",
    ),
    **dict.fromkeys(
        ("program", "plan", "mesh", "trace"), "the model runs eagerly, so there is no plan; step.traffic"
    ),
    **dict.fromkeys(("save_model", "save_checkpoint"), "step.save(path)"),
    **dict.fromkeys(("load_checkpoint", "restore"), "step.load(path), or step.resume(path)"),
}


def called_here(name: object) -> str:
    """A hint with what that is here and its page; empty for a name that other systems do not have."""
    said, page = CALLED_HERE.get(str(name).lower().replace("-", "_"), ("", ""))
    return f"{said} (docs/{page})" if said else ""


__all__ = ["OF_A_SERVER_STEP", "OF_A_STEP", "called_here"]
