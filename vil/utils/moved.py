"""Old module and attribute names, which work for one more version with a DeprecationWarning.

`install()` appends a finder to sys.meta_path. Python consults it only for modules that no other
finder knows, so it costs nothing until an old name is imported. When something moves again, change
its target here.
"""

import importlib
import sys
import warnings
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# old module -> new module
MODULES = {
    "vil.bench.candidates": "vil.bench.baselines",
    "vil.bench.layout": "vil.bench.layout_copies",
    "vil.bench.places": "vil.bench.module_scopes",
    "vil.bench.race": "vil.bench.interleaved_timer",
    "vil.build": "vil.workflows.build_model",
    "vil.build_data": "vil.tasks.classification.build",
    "vil.config.dumping": "vil.config.dump_yaml",
    "vil.config.sources": "vil.config.yaml_source",
    "vil.config.values": "vil.config.coercion",
    "vil.data.archive": "vil.data.formats.archive",
    "vil.data.digits": "vil.data.datasets.digits",
    "vil.data.fake": "vil.data.datasets.fake",
    "vil.data.folder": "vil.data.datasets.folder",
    "vil.data.joined": "vil.data.datasets.concat",
    "vil.data.painting": "vil.data.synthetic.render",
    "vil.data.pictures": "vil.data.datasets.image_list",
    "vil.data.sample": "vil.data.datasets.demo_digits",
    "vil.data.scenes": "vil.data.synthetic.scenes",
    "vil.data.seeding": "vil.data.seed_sequence",
    "vil.data.shared_file": "vil.data.formats.shared_file",
    "vil.data.tar": "vil.data.formats.tar",
    "vil.data.target_map": "vil.data.class_mapping",
    "vil.data.torchvision_sets": "vil.data.datasets.torchvision_sets",
    "vil.data.tsv": "vil.data.formats.tsv",
    "vil.data.tsv_file": "vil.data.formats.tsv_file",
    "vil.data.unreadable": "vil.data.robust_dataset",
    "vil.data.zip_map": "vil.data.formats.imagenet_zip",
    "vil.detection": "vil.tasks.detection",
    "vil.detection.anchors": "vil.tasks.detection.models.anchors",
    "vil.detection.annotations": "vil.tasks.detection.data.coco_json",
    "vil.detection.batch": "vil.tasks.detection.data.batch",
    "vil.detection.coco": "vil.tasks.detection.data.datasets",
    "vil.detection.coco_file": "vil.tasks.detection.data.coco_tables",
    "vil.detection.detections": "vil.tasks.detection.detections",
    "vil.detection.fake": "vil.tasks.detection.data.fake",
    "vil.detection.heads": "vil.tasks.detection.models.heads",
    "vil.detection.listing": "vil.tasks.detection.output_formats",
    "vil.detection.masks": "vil.tasks.detection.data.masks",
    "vil.detection.models": "vil.tasks.detection.models.detectors",
    "vil.detection.pictures": "vil.tasks.detection.visualize",
    "vil.detection.pyramid": "vil.tasks.detection.models.fpn",
    "vil.detection.scoring": "vil.tasks.detection.coco_eval",
    "vil.detection.task": "vil.tasks.detection.task",
    "vil.detection.tiles": "vil.tasks.detection.tiled_inference",
    "vil.detection.transforms": "vil.tasks.detection.data.transforms",
    "vil.detection.weights": "vil.tasks.detection.models.weights",
    "vil.detection.worst": "vil.tasks.detection.error_analysis",
    "vil.engine.disk": "vil.engine.checkpoint.manifest",
    "vil.engine.guard": "vil.engine.preemption",
    "vil.engine.keeper": "vil.engine.checkpoint.manager",
    "vil.engine.log": "vil.engine.logger",
    "vil.engine.losses": "vil.tasks.classification.losses",
    "vil.engine.momenta": "vil.engine.checkpoint.optimizer_state",
    "vil.engine.run": "vil.engine.run_dir",
    "vil.engine.scores": "vil.tasks.classification.topk",
    "vil.engine.sharding": "vil.engine.fsdp",
    "vil.engine.state": "vil.engine.checkpoint.save_load",
    "vil.engine.step": "vil.engine.loop",
    "vil.engine.task": "vil.tasks.classification.task",
    "vil.engine.train": "vil.engine.loop",
    "vil.engine.verdict": "vil.engine.nonfinite",
    "vil.engine.weights": "vil.engine.checkpoint.model_weights",
    "vil.layers.embed": "vil.layers.patch_embed",
    "vil.layers.position": "vil.layers.pos_embed",
    "vil.models.checkpoint": "vil.pretrained.load_weights",
    "vil.models.description": "vil.pretrained.model_card",
    "vil.models.export": "vil.export",
    "vil.models.exported": "vil.export",
    "vil.models.foreign": "vil.integrations.external_models",
    "vil.models.hub": "vil.pretrained.hub",
    "vil.models.msvit": "vil.models.vision_longformer",
    "vil.models.original": "vil.pretrained.convert_2021",
    "vil.models.patch": "vil.integrations.patch_attention",
    "vil.models.patched": "vil.integrations.timm_attention",
    "vil.models.recognise": "vil.pretrained.infer_arch",
    "vil.models.resizing": "vil.pretrained.resize_pos",
    "vil.models.timm_models": "vil.integrations.timm_register",
    "vil.models.traced": "vil.export.trace",
    "vil.models.weight_file": "vil.pretrained.state_dict_io",
    "vil.models.weights": "vil.pretrained.catalog",
    "vil.models.zoo": "vil.models.registry",
    "vil.ops.autotune": "vil.ops.tuning.tuner",
    "vil.ops.backends.chunks": "vil.ops.backends.chunk_layout",
    "vil.ops.backends.cuts": "vil.ops.backends.chunk_groups",
    "vil.ops.backends.gathered": "vil.ops.backends.gather_sdpa",
    "vil.ops.backends.masked": "vil.ops.backends.dense_masked",
    "vil.ops.backends.triton_backward": "vil.ops.backends.triton.backward",
    "vil.ops.backends.triton_forward": "vil.ops.backends.triton.forward",
    "vil.ops.backends.triton_fused": "vil.ops.backends.triton.fused",
    "vil.ops.backends.triton_interpreter": "vil.ops.backends.triton.interpreter",
    "vil.ops.case": "vil.ops.attention_case",
    "vil.ops.choices": "vil.ops.tuning.tuning_cache",
    "vil.ops.definition": "vil.ops.reference",
    "vil.ops.recompute": "vil.ops.custom_op",
    "vil.optim.groups": "vil.optim.param_groups",
    "vil.report.answers": "vil.tasks.classification.predictions",
    "vil.report.page_answers": "vil.tasks.classification.report",
    "vil.report.predictions": "vil.tasks.classification.output_formats",
    "vil.report.run_folder": "vil.report.run_record",
    "vil.utils.files": "vil.utils.atomic_write",
    "vil.utils.progress": "vil.utils.train_step",
    "vil.utils.table": "vil.utils.lookup",
}
# old module -> {old name: new name in the new module, or module:name}; other names did not change
NAMES = {
    "vil.build": {
        "amp_dtype": "vil.builders.device:amp_dtype",
        "build_optimizer": "vil.builders.optim:build_optimizer",
        "build_scaler": "vil.builders.optim:build_scaler",
        "build_schedule": "vil.builders.optim:build_schedule",
        "weight_file": "vil.builders.model:find_weights",
    },
    "vil.data.folder": {"pictures": "image_files"},
    "vil.data.joined": {"Joined": "ConcatImageDataset"},
    "vil.data.pictures": {
        "Picture": "ImageSource",
        "PictureLoader": "ImageListLoader",
        "Pictures": "ImageList",
        "find_pictures": "find_images",
    },
    "vil.data.sample": {
        "read_sample": "read_demo_digits",
        "write_sample": "write_demo_digits",
    },
    "vil.data.scenes": {
        "Drawn": "SceneDataset",
        "annotation": "annotate",
        "scene": "render_scene",
    },
    "vil.data.seeding": {
        "entropy": "seed_sequence",
        "seeded": "fork_rng",
    },
    "vil.data.tar": {"is_picture": "is_image"},
    "vil.data.target_map": {
        "by_name": "columns_by_name",
        "read_target_map": "read_class_mapping",
    },
    "vil.data.torchvision_sets": {"one_at_a_time": "download_lock"},
    "vil.data.unreadable": {
        "Ledger": "BadSampleLog",
        "Samples": "RobustDataset",
    },
    "vil.data.zip_map": {"ZipMap": "ImageNetZip"},
    "vil.detection.models": {
        "Dense": "RetinaNetDetector",
        "PerImage": "PerImageDetector",
        "Settings": "DetectorConfig",
    },
    "vil.engine.disk": {"damage": "find_corruption"},
    "vil.engine.guard": {"Guard": "PreemptionGuard"},
    "vil.engine.keeper": {
        "Keeper": "CheckpointManager",
        "Rhythm": "CheckpointPolicy",
    },
    "vil.engine.log": {"Log": "RunLogger"},
    "vil.engine.losses": {"Loss": "LossFunction"},
    "vil.engine.run": {
        "Run": "RunDir",
        "RunFolderError": "vil.utils.errors:RunFolderError",
        "RunInUseError": "vil.utils.errors:RunInUseError",
        "verdict": "outcome",
    },
    "vil.engine.scores": {
        "by_class": "score_by_class",
        "by_links": "score_by_mapping",
    },
    "vil.engine.sharding": {
        "spread_as": "shard_like",
        "weights_at_hand": "unsharded",
        "whole": "full_tensor",
    },
    "vil.engine.state": {
        "State": "TrainState",
        "pointer": "resolve_link",
    },
    "vil.engine.step": {
        "exchange": "maybe_no_sync",
        "set_rate": "set_lr",
    },
    "vil.engine.task": {
        "Task": "vil.engine.loop:Task",
        "autocast": "vil.engine.evaluation:autocast",
        "evaluating": "vil.engine.evaluation:evaluating",
        "in_step": "vil.engine.evaluation:iter_in_step",
    },
    "vil.engine.verdict": {
        "BadSteps": "NonFiniteSteps",
        "Late": "DelayedFlags",
        "Statistics": "BatchNormSnapshot",
        "agree": "all_reduce_flags",
    },
    "vil.engine.weights": {"whole_weights": "full_state_dict"},
    "vil.models.checkpoint": {
        "classes_after": "select_classes",
        "load_original": "load_2021_weights",
        "names_in": "map_names",
        "original_names": "get_2021_names",
    },
    "vil.models.description": {
        "build_described": "build_from_card",
        "describe": "make_model_card",
    },
    "vil.models.export": {
        "Difference": "vil.export.exporter:Difference",
        "FIRST_OPSET": "vil.export.onnx:FIRST_OPSET",
        "format_of": "vil.export.exporter:infer_format",
    },
    "vil.models.exported": {"Exported": "vil.export.runtime:ExportedModel"},
    "vil.models.foreign": {
        "build_foreign": "build_external",
        "head_names": "vil.models.head_names:find_head_names",
        "layer_numbers": "number_layers",
        "undecayed": "find_no_decay_params",
    },
    "vil.models.hub": {"zoo_name": "find_model_name"},
    "vil.models.msvit": {
        "Stage": "vil.models.stage:Stage",
        "to_map": "vil.models.stage:to_map",
    },
    "vil.models.original": {
        "backbone_of": "extract_backbone",
        "is_original": "has_2021_names",
        "is_surplus": "is_redundant",
        "original_names": "get_2021_names",
        "unused_tables": "find_unused_tables",
        "warn_of_other_rules": "warn_changed_defaults",
    },
    "vil.models.patch": {
        "attentions": "find_attentions",
        "current_grid": "find_grid",
    },
    "vil.models.patched": {"Stamp": "GridCheck"},
    "vil.models.recognise": {"recognise": "infer_arch"},
    "vil.models.resizing": {
        "repeated": "repeat_global",
        "resized": "resize_parameter",
    },
    "vil.models.timm_models": {"ViL": "vil.models.vision_longformer:MsViT"},
    "vil.models.traced": {
        "axes_of": "select_axes",
        "backends": "use_backend",
        "channels": "in_channels",
        "stride": "token_stride",
        "stumbling": "as_export_error",
        "traced": "trace_model",
    },
    "vil.models.weight_file": {
        "fingerprint": "hash_tensors",
        "read_about": "read_metadata",
        "weights_at": "find_weights",
    },
    "vil.models.weights": {
        "by_model": "weight_classes_by_model",
        "notes_of": "get_notes",
        "picture_transform": "image_transform",
        "tables": "load_weight_classes",
    },
    "vil.models.zoo": {
        "get_model": "vil.pretrained.get_model:get_model",
        "with_windows": "replace_windows",
    },
    "vil.report.answers": {"Answers": "Predictions"},
    "vil.report.run_folder": {"Record": "RunRecord"},
    "vil.utils.files": {"set_aside": "write_aside"},
    "vil.utils.progress": {"Progress": "TrainStep"},
}


class MovedModuleFinder:
    """Meta path finder and loader of old modules, whose attributes are those of the new ones."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in MODULES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        return ModuleSpec(name, MovedModuleFinder, is_package=is_package)

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Let Python create the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Import the new module, for its effects such as timm's registration."""
        old = module.__name__
        warn(old, MODULES[old])
        importlib.import_module(MODULES[old])
        module.__getattr__ = partial(get_moved, old)


def get_moved(module: str, name: str) -> Any:
    """Return the attribute that `name` of an old module is now."""
    renamed = NAMES.get(module, {}).get(name)
    home, _, attribute = (renamed or name).rpartition(":")
    home = home or MODULES[module]
    value = getattr(importlib.import_module(home), attribute)
    if renamed:
        warn(f"{module}.{name}", f"{home}.{attribute}")
    return value


def warn(old: str, new: str) -> None:
    """Warn at the caller's caller's caller: the line that imports or reads the old name."""
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


def install() -> None:
    """Make old names importable. Does nothing the second time."""
    if MovedModuleFinder not in sys.meta_path:
        sys.meta_path.append(MovedModuleFinder)
