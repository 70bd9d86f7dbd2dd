"""The host's part of serving: looks embeddings up, cuts prompts into calls, fills positions and tables, samples greedily."""

import numpy as np


class Sequence:
    """A sequence that is being served: its slot (ring), its blocks, and how many tokens it holds."""

    def __init__(self, slot, blocks):
        self.slot, self.blocks, self.length = slot, blocks, 0
        # Slots in use, and which of them hold a token: without alignment those of the tokens.
        self.slots, self.held = 0, []
        # The final state behind the last token, where the model has a draft head.
        self.hidden = None


class Host:
    """Serves sequences with the modules of a folder; `own` is what each device holds, if not what the folder says."""

    def __init__(self, folder, own=None):
        self.folder = folder
        self.document = folder.document
        self.sizes = self.document["graphs"]
        # Programs that take a mask of slots serve sequences with gaps: a few slots stay unused before every call.
        self.gap = 5 if self.sizes["kv"]["aligned"] else 0
        self.stored = folder.stored(folder.own if own is None else own)
        self.cache = folder.empty_cache()
        self.features = []

    def run(self, name, inputs):
        module = self.folder.modules[name]
        return module.run(self.stored[tuple(module.record["devices"])], inputs, self.cache)

    def blocks_per_sequence(self):
        return self.sizes["max_seq_len"] // self.sizes["kv"]["block_tokens"]

    def start(self, slot):
        """A new sequence. Blocks of sequences alternate and run backwards, so that a wrong table shows."""
        each = self.blocks_per_sequence()
        return Sequence(slot, [slot + self.sizes["batch_size"] * (each - 1 - n) for n in range(each)])

    # ---- tokens

    def tokens(self, ids, rows, shape):
        """Inputs that tell a call's tokens; rows behind them are padding."""
        ids = np.asarray(ids)
        host = self.document.get("host")
        if host is None:
            return {"input_ids": np.pad(ids, (0, rows - len(ids))).reshape(shape)}
        placeholders = [host.get(f"{kind}_token", -1) for kind in ("image", "video", "audio")]
        ids = np.where(np.isin(ids, placeholders), host["padding_token"], ids)
        inputs = {}
        for input_name, table in zip(("inputs_embeds", "per_layer_inputs"), host["tables"]):
            found = np.zeros((rows, self.folder.host[table["tensor"]].shape[1]), np.float32)
            found[: len(ids)] = self.folder.host[table["tensor"]][ids].astype(np.float32) * np.float32(table["scale"])
            width = table.get("width")
            inputs[input_name] = found.reshape(*shape, *((-1, width) if width else (-1,)))
        return inputs

    # ---- images

    def encode(self, pixels, positions):
        """Rows of the text space of one image; patches at negative positions are padding. An encoder that reads pictures
        of one size takes the pixels alone, and has no mask."""
        soft_tokens = min(self.sizes["max_soft_tokens"])
        padding = (positions < 0).any(-1)
        lowest = np.finfo(np.float32).min
        inputs = {
            "pixel_values": pixels[None],
            "pixel_position_ids": positions[None],
            "attention_mask": np.where(padding, lowest, np.float32(0))[None],
            "padding_positions": padding[None],
        }
        encoded = self.run(f"vision_t{soft_tokens}", inputs)
        projected = self.run(f"project_t{soft_tokens}", {"image_features": encoded["hidden"]})
        rows = projected["image_embeds"][0]
        return rows[encoded["pooler_mask"][0]] if "pooler_mask" in encoded else rows

    # ---- calls

    def seats(self, seats, rows):
        """Slots, positions, tables and masks of calls: `[(slot, blocks, sequence, tokens)]`, with `rows` rows each of which
        the first `tokens` are held afterwards."""
        slots, positions, masks = [], [], []
        for _, _, sequence, tokens in seats:
            if sequence is None:
                sequence = Sequence(0, [])
            slots.append(sequence.slots + np.arange(rows))
            positions.append(sequence.length + np.arange(rows))
            sequence.held += list(range(sequence.slots, sequence.slots + tokens))
            mask = np.zeros(self.sizes["max_seq_len"], np.float32)
            mask[sequence.held] = 1
            masks.append(mask)
            sequence.slots += tokens
            sequence.length += tokens
        return {
            "cache_position": np.array(slots),
            "position_ids": np.array(positions),
            "attention_mask": np.array(masks),
            "local_block_tables": np.array([slot for slot, _, _, _ in seats]),
        }

    def prefill(self, sequence, ids, images=()):
        """Takes a prompt in; yields the index of the last token of every call and the logits behind it."""
        host = self.document.get("host") or {}
        is_image = np.asarray(ids) == host.get("image_token", -1)
        self.features = [self.encode(*image) for image in images]
        waiting = list(self.features)
        at = 0
        while at < len(ids):
            end = at + 1
            while end < len(ids) and is_image[end] == is_image[at]:
                end += 1
            if is_image[at]:
                rows = min(n for n in self.sizes["image_prefill_chunk_size"] if n >= end - at)
                name = f"image_prefill_{rows}"
            else:
                rows, name = self.sizes["prefill_chunk_size"], "prefill"
                end = min(end, at + rows)
            inputs = self.tokens(ids[at:end], rows, (1, rows))
            if is_image[at]:
                inputs["inputs_embeds"][0, : end - at] = waiting.pop(0)
            sequence.slots += self.gap
            inputs |= self.seats([(sequence.slot, sequence.blocks, sequence, end - at)], rows)
            inputs["block_tables"] = np.array(sequence.blocks)
            inputs["query_position"] = np.array(end - at - 1)
            outputs = self.run(name, inputs)
            sequence.hidden = outputs.get("hidden")
            yield end - 1, outputs["logits"].reshape(-1)
            at = end

    def decode(self, step):
        """One token of each sequence, `[(sequence, token)]`; the logits behind each. Rows without a sequence write into
        the last block and into a ring that nobody uses."""
        batch = min(n for n in self.sizes["decoder_batch_sizes"] if n >= len(step))
        spare = self.document["kv_blocks"] - 1
        used = [sequence.slot for sequence, _ in step]
        empty = [n for n in range(self.sizes["batch_size"]) if n not in used]
        seats = [(s.slot, s.blocks, s, 1) for s, _ in step]
        seats += [(slot, [spare] * self.blocks_per_sequence(), None, 1) for slot in empty[: batch - len(step)]]
        inputs = self.tokens([token for _, token in step], batch, (batch, 1))
        inputs |= self.seats(seats, 1)
        inputs["block_tables"] = np.array([blocks for _, blocks, _, _ in seats])
        outputs = self.run(f"decode_b{batch}", inputs)
        return outputs["logits"].reshape(batch, -1)[: len(step)]

    def draft(self, sequence, token, steps):
        """Logits, projected states and tokens of a draft head's steps behind `token`, which follows the sequence and is
        not in it. The position stays; nothing is written, so both rows of the program are the same."""
        batch = max(self.sizes["decoder_batch_sizes"])
        hidden, found = sequence.hidden.reshape(1, 1, -1), []
        for _ in range(steps):
            inputs = self.tokens([token] * batch, batch, (batch, 1))
            inputs["hidden_states"] = np.repeat(hidden, batch, 0)
            inputs["cache_position"] = np.full((batch, 1), sequence.slots - 1)
            inputs["position_ids"] = np.full((batch, 1), sequence.length)
            inputs["block_tables"] = np.array([sequence.blocks] * batch)
            inputs["local_block_tables"] = np.full(batch, sequence.slot)
            outputs = self.run(f"draft_b{batch}", inputs)
            logits, hidden = outputs["logits"][0, 0], outputs["hidden"][:1]
            token = int(logits.argmax())
            found.append((logits, hidden.reshape(-1), token))
        return found
