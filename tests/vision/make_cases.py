"""Features, logits and tokens of small random checkpoints that see, by transformers and torch.

`python -m tests.vision.make_cases` writes `data/`; it needs an environment with both. The files have no arrays: those
follow from their names and a seed, pixels from the seed. With `--seed N` it prints the cases of another seed.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
VOCABULARY = 90
GREEDY_TOKENS = 8

LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LFM2: dict[str, Any] = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"}, "model_type": "lfm2",
    "tie_word_embeddings": True, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False, "block_ff_dim": 48, "conv_bias": False, "conv_dim": 32, "conv_dim_out": 32,
    "block_dim": 32, "num_heads": 4, "block_multiple_of": 16,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "num_channels": 3,
}  # fmt: skip
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 8, "patch_size": 4, "image_size": 32}
QWEN: dict[str, Any] = {
    "hidden_size": 16, "depth": 3, "num_heads": 2, "intermediate_size": 24, "in_channels": 3, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    **LLAMA, "model_type": "qwen3_5_text", "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1],
                        "partial_rotary_factor": 0.5, "mrope_interleaved": True},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
ROTATION = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

# Class of transformers, its config, the numbers of its image processor, and the grids of its images.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[list[list[int]]]]] = {
    "pixtral": (
        "LlavaForConditionalGeneration",
        {"vision_config": PIXTRAL, "text_config": {**LLAMA, "model_type": "mistral"}, "image_token_index": 10,
         "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        [[[3, 5]], [[2, 1]]],
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {"vision_config": PIXTRAL, "text_config": {**LLAMA, "model_type": "mistral"}, "image_token_index": 10,
         "spatial_merge_size": 2},
        {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}},
        [[[4, 6]], [[2, 4]]],
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {"vision_config": {**TOWER, "model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 36},
         "text_config": LFM2, "image_token_id": 10, "projector_hidden_size": 20, "downsample_factor": 2},
        {**HALF, "encoder_patch_size": 4, "downsample_factor": 2, "tile_size": 16, "min_tiles": 2, "max_tiles": 4,
         "min_image_tokens": 2, "max_image_tokens": 6, "do_image_splitting": True, "use_thumbnail": True},
        [[[4, 4], [4, 4], [8, 2]], [[2, 4]]],
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        {"vision_config": {**TOWER, "model_type": "idefics3_vision", "patch_size": 4, "image_size": 16},
         "text_config": {**LLAMA, "model_type": "llama"}, "image_token_id": 10, "scale_factor": 2},
        {**HALF, "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True},
        [[[4, 4], [4, 4], [4, 4]], [[4, 4]]],
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"vision_config": {**TOWER, "model_type": "smolvlm_vision", "patch_size": 4, "image_size": 32},
         "text_config": {**LLAMA, "model_type": "llama"}, "image_token_id": 10, "scale_factor": 4},
        {**HALF, "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True},
        [[[8, 8], [8, 8], [8, 8]], [[8, 8]]],
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {"vision_config": {**TOWER, "patch_size": [4, 4], "image_size": [16, 16], "attention_bias": True},
         "text_config": {**LLAMA, "model_type": "qwen2"}, "image_token_id": 10, "image_seq_length": 4},
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "min_patches": 1, "max_patches": 4,
         "size": {"height": 16, "width": 16}},
        [[[4, 4], [4, 4], [4, 4]], [[4, 4]]],
    ),
    "internvl-rms": (
        "InternVLForConditionalGeneration",
        {"vision_config": {**TOWER, "patch_size": [4, 4], "image_size": [16, 16], "norm_type": "rms_norm",
                           "use_qk_norm": True},
         "text_config": {**LLAMA, "model_type": "qwen3"}, "image_token_id": 10, "image_seq_length": 4},
        {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "min_patches": 1, "max_patches": 4,
         "size": {"height": 16, "width": 16}},
        [[[4, 4]]],
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"vision_config": {**{name: value for name, value in QWEN.items() if "size" not in name}, "embed_dim": 16,
                           "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4, "spatial_merge_size": 2,
                           "temporal_patch_size": 2},
         "text_config": {**LLAMA, **ROTATION, "model_type": "qwen2_vl_text"}, "image_token_id": 10},
        {"size": {"shortest_edge": 128, "longest_edge": 1024}},
        [[[6, 10]], [[4, 2]]],
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {"vision_config": {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
         "text_config": {**LLAMA, **ROTATION, "model_type": "qwen2_5_vl_text"}, "image_token_id": 10},
        {"size": {"shortest_edge": 128, "longest_edge": 1024}},
        [[[6, 10]], [[4, 2]]],
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {"vision_config": {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
         "text_config": {**LLAMA, **ROTATION, "model_type": "qwen3_vl_text"}, "image_token_id": 10},
        {**HALF, "size": {"shortest_edge": 128, "longest_edge": 1024}},
        [[[6, 10]], [[4, 2]]],
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"vision_config": {**QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
         "text_config": {**LLAMA, **ROTATION, **EXPERTS, "model_type": "qwen3_vl_moe_text", "decoder_sparse_step": 1,
                         "mlp_only_layers": []},
         "image_token_id": 10},
        {**HALF, "size": {"shortest_edge": 128, "longest_edge": 1024}},
        [[[6, 10]]],
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {"vision_config": {**QWEN, "num_position_embeddings": 16}, "text_config": QWEN3_5, "image_token_id": 10},
        {**HALF, "size": {"shortest_edge": 128, "longest_edge": 1024}},
        [[[6, 10]], [[4, 2]]],
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        {"vision_config": {**QWEN, "num_position_embeddings": 16},
         "text_config": {**QWEN3_5, **EXPERTS, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 20},
         "image_token_id": 10},
        {**HALF, "size": {"shortest_edge": 128, "longest_edge": 1024}},
        [[[6, 10]]],
    ),
}  # fmt: skip
# Model types that keep these arrays with inputs first, while transformers turns them.
TURNED = {"qwen3_vl_moe": (".experts.gate_up_proj", ".experts.down_proj")}
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def array_of(name: str, shape: list[int], seed: int) -> np.ndarray:
    """The array that a checkpoint has under this name: noise, around 1 for the scale of a norm."""
    made = np.random.default_rng([zlib.crc32(name.encode()), seed]).normal(0, 0.15, shape).astype(np.float32)
    return made + 1 if "norm" in name.lower() and name.endswith("weight") else made


def pixels_of(grids: list[list[int]], patch: int, seed: int) -> np.ndarray:
    """Pixels of an image as they are on the wire: [patches, patch * patch * 3] of uint8."""
    patches = sum(rows * columns for rows, columns in grids)
    return np.random.default_rng([seed, patches]).integers(0, 256, (patches, 3 * patch**2), np.uint8)


def prompt_of(images: list[int], token: int, seed: int, *, is_cut: bool) -> list[int]:
    """A prompt with the given number of features for each image, perhaps cut by another token now and then."""
    draw = np.random.default_rng(seed)
    words = [place for place in range(3, VOCABULARY) if place not in range(token - 4, token + 8)]
    found = draw.choice(words, 5).tolist()
    for features in images:
        for place in range(features):
            found += [token] if place % 3 or not is_cut else [int(draw.choice(words)), token]
        found += draw.choice(words, 4).tolist()
    return found


def tiles_of(pixels: np.ndarray, grids: list[list[int]], patch: int) -> list[np.ndarray]:
    """Pictures [3, height, width] of an image's tiles."""
    found, start = [], 0
    for rows, columns in grids:
        end = start + rows * columns
        tile = pixels[start:end].reshape(rows, columns, patch, patch, 3).transpose(4, 0, 2, 1, 3)
        found.append(tile.reshape(3, rows * patch, columns * patch))
        start = end
    return found


def make(name: str, seed: int) -> dict[str, Any]:
    """One case: config, shapes of the arrays, pixels, prompt; features, logits and tokens that follow."""
    import torch  # type: ignore[import-not-found]
    import transformers

    class_name, fields, processor, images = CASES[name]
    kind = getattr(transformers, class_name)
    config = kind.config_class(**fields)
    model = kind(config).eval()
    state = model.state_dict()
    tied = (
        set()
        if not getattr(model, "_tied_weights_keys", None) or not config.tie_word_embeddings
        else {"lm_head.weight"}
    )
    is_turned = {key: key.endswith(TURNED.get(name, ("-",))) for key in state}
    shapes = {
        key: list(value.swapaxes(-2, -1).shape if is_turned[key] else value.shape)
        for key, value in state.items()
        if key not in tied
    }
    arrays = {key: torch.tensor(array_of(key, shape, seed)) for key, shape in shapes.items()}
    arrays |= {key: arrays[key].swapaxes(-2, -1) for key in arrays if is_turned[key]}
    model.load_state_dict(arrays, strict=False)
    model.tie_weights()

    vision = fields["vision_config"]
    patch = vision["patch_size"][0] if isinstance(vision["patch_size"], list) else vision["patch_size"]
    processor = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD, **processor}
    mean = np.array(processor["image_mean"], np.float32)[:, None, None]
    std = np.array(processor["image_std"], np.float32)[:, None, None]
    features, deep, counts, given = [], [], [], []
    for grids in images:
        tiles = tiles_of(pixels_of(grids, patch, seed), grids, patch)
        normal = [(tile.astype(np.float32) / 255 - mean) / std for tile in tiles]
        inputs = inputs_of(name, normal, grids, patch, torch)
        with torch.no_grad():
            made = model.get_image_features(**inputs)
        pooled = made.pooler_output
        found = torch.cat([part.reshape(-1, part.shape[-1]) for part in pooled])
        features.append(found)
        stacked = getattr(made, "deepstack_features", None) or []
        deep.append([rounded(part if torch.is_tensor(part) else torch.cat(list(part))) for part in stacked])
        counts.append(len(found))
        given.append(inputs)
    token = int(fields.get("image_token_id") or fields["image_token_index"])
    prompt = prompt_of(counts, token, seed, is_cut="qwen" not in name)
    if "qwen" in name:
        logits, greedy = of_rotated_positions(model, prompt, token, given, torch)
    else:
        logits, greedy = of_plain_positions(model, prompt, token, torch.cat(features), given, torch)
    written = {**config.to_dict(), "architectures": [class_name]}
    return {
        "seed": seed,
        "config": {key: value for key, value in written.items() if value is not None},
        "processor": processor,
        "shapes": shapes,
        "images": images,
        "patch": patch,
        "token": token,
        "prompt": prompt,
        "features": [rounded(found) for found in features],
        "deep": deep,
        "logits": rounded(logits[-6:]),
        "greedy": greedy,
    }


def of_plain_positions(
    model: Any, prompt: list[int], token: int, features: Any, given: list[dict[str, Any]], torch: Any
) -> tuple[Any, list[int]]:
    """Logits of a prompt, and the tokens that follow, from its embeddings."""
    embedded = model.get_input_embeddings()(torch.tensor([prompt])).detach().clone()
    embedded[0, torch.tensor(prompt) == token] = features
    greedy: list[int] = []
    with torch.no_grad():
        logits = model(inputs_embeds=embedded).logits[0]
        if len(given) == 1:
            # The path of the model itself, from pixels to logits.
            own = model(input_ids=torch.tensor([prompt]), **given[0]).logits[0]
            assert torch.allclose(own, logits, atol=1e-5), "features are not where the model puts them"
        for _ in range(GREEDY_TOKENS):
            last = model(inputs_embeds=embedded).logits[0, -1]
            greedy.append(int(last.argmax()))
            following = model.get_input_embeddings()(torch.tensor([[greedy[-1]]]))
            embedded = torch.cat([embedded, following], dim=1)
    return logits, greedy


def of_rotated_positions(
    model: Any, prompt: list[int], token: int, given: list[dict[str, Any]], torch: Any
) -> tuple[Any, list[int]]:
    """Tokens by the model's own path, which finds three positions for each token."""
    pixels = {name: torch.cat([each[name] for each in given]) for name in given[0]}
    ids, greedy, first = list(prompt), [], None
    for _ in range(GREEDY_TOKENS):
        tokens = torch.tensor([ids])
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(input_ids=tokens, mm_token_type_ids=(tokens == token).int(), **pixels).logits[0]
        first = logits if first is None else first
        greedy.append(int(logits[-1].argmax()))
        ids.append(greedy[-1])
    return first, greedy


def inputs_of(
    name: str, tiles: list[np.ndarray], grids: list[list[int]], patch: int, torch: Any
) -> dict[str, Any]:
    """Pixels as the class of transformers takes them."""
    family = name.partition("-")[0]
    if family in ("pixtral", "mistral3"):
        size = [grids[0][0] * patch, grids[0][1] * patch]
        return {"pixel_values": torch.tensor(np.stack(tiles)), "image_sizes": torch.tensor([size])}
    if family == "lfm2_vl":
        most = max(rows * columns for rows, columns in grids)
        flat = np.zeros((len(tiles), most, 3 * patch**2), np.float32)
        mask = np.zeros((len(tiles), most), np.int32)
        for place, (tile, (rows, columns)) in enumerate(zip(tiles, grids, strict=True)):
            cut = tile.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
            flat[place, : rows * columns] = cut.reshape(rows * columns, -1)
            mask[place, : rows * columns] = 1
        return {
            "pixel_values": torch.tensor(flat),
            "spatial_shapes": torch.tensor(grids),
            "pixel_attention_mask": torch.tensor(mask),
        }
    if family.startswith("qwen"):
        (tile,), ((rows, columns),) = tiles, grids
        cut = tile.reshape(3, rows // 2, 2, patch, columns // 2, 2, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.repeat(cut[:, :, :, :, :, None], 2, axis=5)
        return {
            "pixel_values": torch.tensor(frames.reshape(rows * columns, -1)),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }
    stacked = torch.tensor(np.stack(tiles))
    return {"pixel_values": stacked[None] if family in ("idefics3", "smolvlm") else stacked}


def rounded(numbers: Any) -> list[list[float]]:
    """Numbers as they are kept."""
    return [[round(float(number), 6) for number in row] for row in numbers]


def main() -> None:
    """Write every case, or print those of another seed."""
    if sys.argv[1:2] == ["--seed"]:
        print(json.dumps({name: make(name, int(sys.argv[2])) for name in CASES}))
        return
    for name in sys.argv[1:] or CASES:
        (DATA / f"{name}.json").write_text(json.dumps(make(name, 0)) + "\n")


if __name__ == "__main__":
    main()
