//! The rules that cut weights over devices, for one number of devices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::Models;
use super::placement::{Cut, LayerShare, PlacedWeight, Placement, Shares, VocabularyShare};
use super::role::{Module, Part, Role};
use crate::diag::count;
use crate::model::{LayerSpec, VisionSpec, Weight, WeightTable};
use crate::recipe::Assignment;
use crate::tensor::{Axis, Encoding, Shape, Span, lcm};

/// Group sizes that are offered when a group does not fit.
const GROUPS: [u64; 4] = [128, 64, 32, 16];

/// Why weights cannot be shared by this number of devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Misfit {
    /// The image encoder's: it depends on the list of vision devices only.
    pub vision: bool,
    /// The rule and the numbers that clash.
    pub message: String,
    /// What works beside another number of devices.
    pub help: Option<String>,
}

/// Heads of one layer.
#[derive(Debug, Clone, Copy)]
struct Heads {
    q: u64,
    kv: u64,
    dim: u64,
}

/// A stored weight as the rules see it.
struct Stored<'a> {
    weight: &'a Weight,
    encoding: &'a Arc<Encoding>,
    part: Part,
}

/// The shares of one dimension that a layer's matrices agree on.
type Spans = (Vec<Span>, u64);

pub(super) struct Rules<'a> {
    models: Models<'a>,
    all: Vec<u32>,
    vision: &'a [u32],
    weights: Vec<Stored<'a>>,
    /// Experts of each (module, layer).
    experts: BTreeMap<(Module, usize), u64>,
    misfits: Vec<Misfit>,
    seen: BTreeSet<String>,
}

impl<'a> Rules<'a> {
    pub(super) fn new(
        models: Models<'a>,
        table: &'a WeightTable,
        assignment: &'a Assignment,
        devices: u32,
        vision: &'a [u32],
    ) -> Rules<'a> {
        let weights: Vec<Stored<'a>> = assignment
            .stored(table)
            .map(|(a, weight)| Stored { weight, encoding: &a.encoding, part: Part::of(weight) })
            .collect();
        let mut experts: BTreeMap<(Module, usize), u64> = BTreeMap::new();
        for s in &weights {
            if let (Role::Expert, Some(layer)) = (s.part.role, s.part.layer) {
                let n = experts.entry((s.part.module, layer)).or_default();
                *n = (*n).max(u64::try_from(s.weight.expert).unwrap_or(0) + 1);
            }
        }
        Rules {
            models,
            all: (0..devices).collect(),
            vision,
            weights,
            experts,
            misfits: Vec::new(),
            seen: BTreeSet::new(),
        }
    }

    /// Cuts everything; what does not fit is left whole and told.
    pub(super) fn apply(mut self) -> (Placement, Vec<Misfit>) {
        let mlp = self.mlp_shares();
        let vocabularies = self.vocabularies();
        let mut placement = Placement {
            devices: self.all.len() as u32,
            vision_devices: self.vision.to_vec(),
            layers: self.layers(Module::Text, &mlp),
            draft_layers: self.layers(Module::Draft, &mlp),
            vision: self.layers(Module::Vision, &mlp).into_iter().next(),
            ..Placement::default()
        };
        let share = |key: (Module, bool)| {
            vocabularies
                .get(&key)
                .map(|(real, (_, local))| VocabularyShare { real: *real, local: *local })
        };
        placement.vocabulary = share((Module::Text, false));
        placement.per_layer_vocabulary = share((Module::Text, true));
        placement.draft_vocabulary = share((Module::Draft, false));
        for at in 0..self.weights.len() {
            let cut = self.cut(at, &mlp, &vocabularies);
            let s = &self.weights[at];
            let placed = PlacedWeight {
                shape: stored_shape(s.weight),
                encoding: Arc::clone(s.encoding),
                cut,
            };
            placement.weights.insert(s.weight.name.clone(), placed);
        }
        (placement, self.misfits)
    }

    fn say(&mut self, module: Module, message: String, help: Option<String>) {
        if self.seen.insert(message.clone()) {
            self.misfits.push(Misfit { vision: module == Module::Vision, message, help });
        }
    }

    fn members(&self, module: Module) -> Vec<u32> {
        match module {
            Module::Text | Module::Draft => self.all.clone(),
            Module::Vision => self.vision.to_vec(),
            Module::Host => Vec::new(),
        }
    }

    fn layer_specs(&self, module: Module) -> &'a [LayerSpec] {
        let draft_alone = self.models.main.filter(|m| m.draft.is_some());
        let model = match module {
            Module::Text => self.models.main.filter(|m| m.draft.is_none()),
            Module::Draft => self.models.draft.or(draft_alone),
            Module::Vision | Module::Host => None,
        };
        model.map_or(&[], |m| &m.text.layers)
    }

    fn heads(&self, module: Module, layer: usize) -> Option<Heads> {
        if module == Module::Vision {
            return match self.models.main?.vision.as_ref()? {
                VisionSpec::Tower(t) => {
                    Some(Heads { q: t.q_heads, kv: t.kv_heads, dim: t.head_dim })
                }
                VisionSpec::Siglip(t) => {
                    Some(Heads { q: t.heads, kv: t.heads, dim: t.hidden_size / t.heads.max(1) })
                }
                VisionSpec::Embedder(_) => None,
            };
        }
        let a = &self.layer_specs(module).get(layer)?.attention;
        Some(Heads { q: a.q_heads, kv: a.kv_heads, dim: a.head_dim })
    }

    /// The shares of a module's layers; the heads of layers whose tower is left out are not asked for.
    fn layers(
        &mut self,
        module: Module,
        mlp: &BTreeMap<(Module, usize), Spans>,
    ) -> Vec<LayerShare> {
        let present =
            self.weights.iter().any(|s| s.part.module == module && s.part.layer.is_some());
        let layers = match module {
            Module::Vision => 1,
            _ => self.layer_specs(module).len(),
        };
        if !present {
            return Vec::new();
        }
        let n = self.members(module).len() as u64;
        let mut out = Vec::with_capacity(layers);
        for layer in 0..layers {
            let Some(heads) = self.heads(module, layer) else { continue };
            self.check_heads(module, heads, n);
            let experts = self.experts.get(&(module, layer)).copied();
            if let Some(e) = experts
                && !e.is_multiple_of(n)
            {
                let at = prefix(module);
                self.say(
                    module,
                    format!(
                        "{at}blk.*.ffn_gate_up_exps: {e} experts do not split over {n} devices"
                    ),
                    None,
                );
            }
            out.push(LayerShare {
                q_heads: (heads.q / n).max(1),
                kv_heads: (heads.kv / n).max(1),
                kv_replication: (n / heads.kv.max(1)).max(1),
                mlp_width: mlp.get(&(module, layer)).map(|(_, extent)| *extent),
                experts: experts.map(|e| e.div_ceil(n)),
            });
        }
        out
    }

    fn check_heads(&mut self, module: Module, heads: Heads, n: u64) {
        let at = prefix(module);
        if n > heads.q {
            let less = if n == heads.q * 2 { "half a head" } else { "less than a head" };
            self.say(
                module,
                format!(
                    "{at}blk.*.attn_q: {n} devices for {} attention heads leave {less} to each",
                    heads.q
                ),
                None,
            );
        } else if !heads.q.is_multiple_of(n) {
            self.say(
                module,
                format!(
                    "{at}blk.*.attn_q: {} attention heads do not split over {n} devices",
                    heads.q
                ),
                None,
            );
        }
        let (fits, rule) = if n <= heads.kv {
            (heads.kv.is_multiple_of(n), "do not split over")
        } else {
            (n.is_multiple_of(heads.kv), "cannot each be repeated on as many of")
        };
        if !fits {
            self.say(
                module,
                format!("{at}blk.*.attn_k: {} key heads {rule} {n} devices", heads.kv),
                None,
            );
        }
    }

    /// The common shares of every layer's gate, up and down matrices.
    fn mlp_shares(&mut self) -> BTreeMap<(Module, usize), Spans> {
        let mut units: BTreeMap<(Module, usize), (u64, Option<u64>)> = BTreeMap::new();
        for s in &self.weights {
            let Some(layer) = s.part.layer else { continue };
            let Some((rows, cols)) = s.weight.shape.matrix() else { continue };
            let (width, grain) = match s.part.role {
                Role::MlpCols => (cols, s.encoding.grain(Axis::Cols)),
                Role::MlpRows if s.weight.shape.rank() == 2 => (rows, s.encoding.grain(Axis::Rows)),
                Role::MlpRows => (cols, s.encoding.grain(Axis::Cols)),
                _ => continue,
            };
            let unit = units.entry((s.part.module, layer)).or_insert((width, Some(1)));
            unit.1 = unit.1.zip(grain).and_then(|(a, b)| lcm(a, b));
        }
        let mut out = BTreeMap::new();
        for (key, (width, unit)) in units {
            let n = self.members(key.0).len() as u64;
            let Some(unit) = unit else {
                if n > 1 {
                    let at = prefix(key.0);
                    self.say(
                        key.0,
                        format!("{at}blk.*.ffn_down.weight: its encoding cannot be cut along columns; {n} devices need that"),
                        Some("an encoding without a permutation of columns can be cut".to_owned()),
                    );
                }
                continue;
            };
            out.insert(key, even_shares(width, unit, n));
        }
        out
    }

    /// (tokens, shares) of every vocabulary: by module, and whether it is the per-layer table's.
    fn vocabularies(&mut self) -> BTreeMap<(Module, bool), (u64, Spans)> {
        let mut blocks: BTreeMap<(Module, bool), (u64, Option<u64>)> = BTreeMap::new();
        for s in &self.weights {
            let per_layer = match s.part.role {
                Role::Vocabulary => false,
                Role::PerLayerVocabulary => true,
                _ => continue,
            };
            let Some((rows, _)) = s.weight.shape.matrix() else { continue };
            let block = blocks.entry((s.part.module, per_layer)).or_insert((rows, Some(1)));
            let grain = s.encoding.grain(Axis::Rows);
            block.1 = block.1.zip(grain).and_then(|(a, b)| lcm(a, b));
        }
        let mut out = BTreeMap::new();
        for (key, (rows, block)) in blocks {
            let n = self.members(key.0).len() as u64;
            // A block beyond 64 bits leaves everything on the first device.
            let block = block.unwrap_or(rows).max(1);
            let share = rows.div_ceil(n.max(1)).checked_next_multiple_of(block).unwrap_or(rows);
            let spans: Vec<Span> = (0..n)
                .map(|d| {
                    let start = share.saturating_mul(d).min(rows);
                    Span { start, len: share.min(rows - start) }
                })
                .collect();
            let extent = spans.iter().map(|s| s.len).max().unwrap_or(rows);
            out.insert(key, (rows, (spans, extent)));
        }
        out
    }

    fn cut(
        &mut self,
        at: usize,
        mlp: &BTreeMap<(Module, usize), Spans>,
        vocabularies: &BTreeMap<(Module, bool), (u64, Spans)>,
    ) -> Cut {
        let s = &self.weights[at];
        let (weight, part) = (s.weight, s.part);
        let devices = self.members(part.module);
        let n = devices.len() as u64;
        let whole = |devices: Vec<u32>| Cut::Whole { devices };
        if n <= 1 {
            return whole(devices);
        }
        let heads = |rules: &Self| rules.heads(part.module, part.layer?);
        let (axis, spans) = match part.role {
            Role::Whole => return whole(devices),
            Role::Expert => {
                let all = part.layer.and_then(|l| self.experts.get(&(part.module, l)));
                let each = all.copied().unwrap_or(1).div_ceil(n).max(1);
                let owner = u64::try_from(weight.expert).unwrap_or(0) / each;
                let owner = usize::try_from(owner).ok().and_then(|o| devices.get(o)).copied();
                return whole(owner.into_iter().collect());
            }
            Role::QueryRows | Role::QueryCols => {
                let Some(heads) = heads(self).filter(|h| h.q.is_multiple_of(n)) else {
                    return whole(devices);
                };
                let each = heads.q / n * heads.dim;
                let axis = if part.role == Role::QueryRows { Axis::Rows } else { Axis::Cols };
                if !self.fits_heads(at, axis, heads.q / n, each, n) {
                    return whole(devices);
                }
                let spans = (0..n).map(|d| Span { start: d * each, len: each }).collect();
                (axis, (spans, each))
            }
            Role::KeyRows => {
                let Some(heads) = heads(self) else { return whole(devices) };
                let (each_heads, sharing) = (heads.kv / n, n / heads.kv.max(1));
                if each_heads * n != heads.kv && sharing * heads.kv != n {
                    return whole(devices);
                }
                let each_heads = each_heads.max(1);
                let each = each_heads * heads.dim;
                if !self.fits_heads(at, Axis::Rows, each_heads, each, n) {
                    return whole(devices);
                }
                let first = |d: u64| if sharing > 1 { d / sharing } else { d };
                let spans = (0..n).map(|d| Span { start: first(d) * each, len: each }).collect();
                (Axis::Rows, (spans, each))
            }
            Role::MlpRows | Role::MlpCols => {
                let Some(spans) = part.layer.and_then(|l| mlp.get(&(part.module, l))) else {
                    return whole(devices);
                };
                let axis = if part.role == Role::MlpRows { Axis::Rows } else { Axis::Cols };
                (axis, spans.clone())
            }
            Role::Vocabulary | Role::PerLayerVocabulary => {
                let per_layer = part.role == Role::PerLayerVocabulary;
                let Some((_, spans)) = vocabularies.get(&(part.module, per_layer)) else {
                    return whole(devices);
                };
                (Axis::Rows, spans.clone())
            }
        };
        self.shares(at, axis, devices, spans)
    }

    /// Whether a device's heads end where blocks end. A weight that every device holds whole is cut nowhere.
    fn fits_heads(&mut self, at: usize, axis: Axis, heads: u64, each: u64, n: u64) -> bool {
        let s = &self.weights[at];
        let vector = s.weight.shape.rank() == 1;
        let (rows, cols) = s.weight.shape.matrix().unwrap_or((0, 0));
        let by_rows = axis == Axis::Rows && !vector;
        if each == if by_rows { rows } else { cols } {
            return true;
        }
        let grain = s.encoding.grain(if by_rows { Axis::Rows } else { Axis::Cols });
        let (module, leaf) = (s.part.module, leaf(&s.weight.name));
        let what = if by_rows { "rows" } else { "columns" };
        let (name, heads) = (format!("{}blk.*.{leaf}", prefix(module)), plural(heads, "head"));
        let Some(grain) = grain else {
            self.say(
                module,
                format!("{name}: its encoding cannot be cut along {what}; {n} devices need that"),
                Some("an encoding without a permutation of columns can be cut".to_owned()),
            );
            return false;
        };
        if each.is_multiple_of(grain) {
            return true;
        }
        let share = if each * 2 == grain { "half a group" } else { "part of a group" };
        let message = format!(
            "{name}: {heads} on each of {n} devices, {} {what}: {share} of {}",
            count(each),
            count(grain)
        );
        let fitting: Vec<u64> = GROUPS.into_iter().filter(|g| each.is_multiple_of(*g)).collect();
        let help = if by_rows || fitting.is_empty() {
            format!("an encoding with one scale a row (int8-channel, fp8-channel) fits {n} devices")
        } else {
            format!("on {n} devices: groups of {}", choices(&fitting))
        };
        self.say(module, message, Some(help));
        false
    }

    /// A cut over these spans, unless padding would not decode to zeros.
    fn shares(&mut self, at: usize, axis: Axis, devices: Vec<u32>, (spans, extent): Spans) -> Cut {
        let s = &self.weights[at];
        let (rows, cols) = s.weight.shape.matrix().unwrap_or((0, 0));
        let by_rows = axis == Axis::Rows && s.weight.shape.rank() > 1;
        let len = if by_rows { rows } else { cols };
        if spans.iter().all(|s| s.start == 0 && s.len == len) {
            return Cut::Whole { devices };
        }
        let matrix_axis = if by_rows { Axis::Rows } else { Axis::Cols };
        let encoding = Arc::clone(s.encoding);
        let short =
            spans.iter().find(|s| s.len < extent && !encoding.pads_with_zero(matrix_axis, s.len));
        if let Some(short) = short {
            let (module, leaf, layer) = (s.part.module, leaf(&s.weight.name), s.part.layer);
            let block = if layer.is_some() { "blk.*." } else { "" };
            let message = format!(
                "{}{block}{leaf}: the largest share is {}, the smallest {}, and {} has no zeros to fill the difference with",
                prefix(module),
                count(extent),
                count(spans.iter().map(|s| s.len).min().unwrap_or(short.len)),
                encoding
            );
            let help =
                "an encoding without zero points, tables of values and e8m0 codes pads with zeros";
            self.say(module, message, Some(help.to_owned()));
            return Cut::Whole { devices };
        }
        let shares = Shares { devices, spans, extent };
        match axis {
            Axis::Rows => Cut::Rows(shares),
            Axis::Cols => Cut::Cols(shares),
        }
    }
}

/// The shape that the container stores: it has no rank 0.
fn stored_shape(weight: &Weight) -> Shape {
    if weight.shape.rank() == 0 { Shape::from([1]) } else { weight.shape.clone() }
}

/// Whole units as evenly as possible, the first devices getting one more; the last unit may be short.
fn even_shares(width: u64, unit: u64, n: u64) -> Spans {
    let units = width.div_ceil(unit.max(1));
    let (each, more) = (units / n.max(1), units % n.max(1));
    let first = |d: u64| (each * d + more.min(d)).saturating_mul(unit).min(width);
    let spans: Vec<Span> =
        (0..n).map(|d| Span { start: first(d), len: first(d + 1) - first(d) }).collect();
    let extent = spans.iter().map(|s| s.len).max().unwrap_or(width);
    (spans, extent)
}

fn prefix(module: Module) -> &'static str {
    match module {
        Module::Draft => "draft.",
        Module::Vision => "vision.",
        Module::Text | Module::Host => "",
    }
}

/// The name after `blk.N.`, or after the module's prefix.
fn leaf(name: &str) -> String {
    let rest = ["draft.", "vision."].iter().find_map(|p| name.strip_prefix(p)).unwrap_or(name);
    let layer = rest.strip_prefix("blk.").and_then(|r| r.split_once('.'));
    layer.map_or(rest, |(_, leaf)| leaf).to_owned()
}

fn plural(n: u64, what: &str) -> String {
    if n == 1 { format!("{n} {what}") } else { format!("{} {what}s", count(n)) }
}

/// `1, 2, 4 or 8`
pub(super) fn choices(values: &[u64]) -> String {
    let texts: Vec<String> = values.iter().map(u64::to_string).collect();
    match texts.split_last() {
        None => "none".to_owned(),
        Some((last, [])) => last.clone(),
        Some((last, head)) => format!("{} or {last}", head.join(", ")),
    }
}
