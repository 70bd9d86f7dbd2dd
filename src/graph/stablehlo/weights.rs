//! Weights inside a module: planes as arguments, widened and scaled to f32 where they are used.

use super::print::{ArgumentKind, Printer};
use super::text::V;
use crate::graph::ir::{WeightId, WeightRef, WeightShare};
use crate::tensor::{DType, Encoding, PlaneLayout, PlaneSpec, Scheme, role};

/// What stands for an expert's number in the arguments of several devices, each of which has experts of its own.
pub const LOCAL_EXPERT: &str = "local";

/// Name of a plane's argument: the weight's name, and the plane's role when there are several.
pub fn argument_name(weight: &str, encoding: &Encoding, plane: &PlaneSpec) -> String {
    match encoding.planes.len() {
        1 => weight.to_owned(),
        _ => format!("{weight}:{}", plane.role),
    }
}

/// How a module takes a plane's elements: whole ones by their own type, smaller ones as packed bytes.
pub(super) fn element(dtype: DType) -> Option<(&'static str, bool)> {
    Some(match dtype {
        DType::F32 => ("f32", false),
        DType::F16 => ("f16", false),
        DType::BF16 => ("bf16", false),
        DType::F8E4M3 => ("f8E4M3FN", false),
        DType::F8E5M2 => ("f8E5M2", false),
        DType::E8M0 => ("f8E8M0FNU", false),
        DType::I8 => ("i8", false),
        DType::U8 => ("ui8", false),
        DType::I16 => ("i16", false),
        DType::I32 => ("i32", false),
        DType::I64 => ("i64", false),
        DType::Bool => ("i1", false),
        DType::I4 => ("i4", true),
        DType::U4 => ("ui4", true),
        DType::F4E2M1 => ("f4E2M1FN", true),
        _ => return None,
    })
}

/// What devices hold under one argument.
struct Held {
    /// The weight's name in arguments.
    name: String,
    /// The weight of every device by rank, or the one of all.
    weights: Vec<String>,
}

impl Printer<'_> {
    pub(super) fn weight_ref(&mut self, id: WeightId) -> Option<WeightRef> {
        let found = self.program.weight(id).cloned();
        if found.is_none() {
            self.fault(format!("there is no weight {}", id.0));
        }
        found
    }

    /// One plane as an argument, its elements unpacked: `[grid rows, grid columns]`.
    fn plane(
        &mut self,
        held: &Held,
        weight: &WeightRef,
        encoding: &Encoding,
        k: usize,
    ) -> Option<V> {
        let spec = encoding.planes.get(k)?;
        let (rows, cols) = weight.shape.matrix()?;
        let (grid_rows, grid_cols) = match spec.layout {
            PlaneLayout::Tiled { .. } => spec.grid(rows, cols),
            PlaneLayout::Table { extent: [r, c] } => (r, c),
        };
        let Some((ty, packed)) = element(spec.dtype) else {
            self.fault(format!("{}: {} cannot be an argument", weight.name, spec.dtype));
            return None;
        };
        let argument = argument_name(&held.name, encoding, spec);
        if let Some(v) = self.planes.get(&argument) {
            return Some(v.clone());
        }
        let kind = ArgumentKind::Weight { weights: held.weights.clone(), plane: k };
        let v = if packed {
            let bytes = spec.row_bytes(grid_cols)?;
            let raw = self.argument(&argument, &[grid_rows, bytes], "ui8", kind);
            let pairs = self.f.bitcast(&raw, &[grid_rows, bytes, 2], ty);
            let all = self.f.reshape(&pairs, &[grid_rows, bytes * 2]);
            self.f.slice(&all, 1, 0, grid_cols)
        } else {
            let own = weight.shape.extents();
            let whole = encoding.planes.len() == 1;
            let shape = if whole { own.to_vec() } else { vec![grid_rows, grid_cols] };
            let raw = self.argument(&argument, &shape, ty, kind);
            self.f.reshape(&raw, &[grid_rows, grid_cols])
        };
        self.planes.insert(argument, v.clone());
        Some(v)
    }

    /// The weight as `[rows, columns]` of f32.
    pub(super) fn matrix(&mut self, id: WeightId) -> Option<V> {
        let weight = self.weight_ref(id)?;
        let held = Held { name: weight.name.clone(), weights: vec![weight.name.clone()] };
        self.held(&held, &weight)
    }

    /// The device's `j`-th of `local` experts as `[rows, columns]` of f32. Experts of several devices share one argument,
    /// so they have to be stored alike.
    pub(super) fn expert(&mut self, all: &[WeightId], j: u64, local: u64) -> Option<V> {
        let at = usize::try_from(j).ok()?;
        let first = *all.get(at)?;
        let weight = self.weight_ref(first)?;
        if weight.share != WeightShare::Expert {
            return self.matrix(first);
        }
        let step = usize::try_from(local).ok()?.max(1);
        let mut weights = Vec::new();
        for id in all.iter().skip(at).step_by(step) {
            let other = self.weight_ref(*id)?;
            if (self.encodings)(&other.name) != (self.encodings)(&weight.name) {
                let (a, b) = (&weight.name, &other.name);
                self.fault(format!("{a} and {b} are stored in different encodings"));
                return None;
            }
            weights.push(other.name);
        }
        // blk.3.ffn_down_exps.17.weight -> blk.3.ffn_down_exps.local.1.weight
        let mut parts: Vec<&str> = weight.name.split('.').collect();
        let number = j.to_string();
        let at = parts.len().checked_sub(2)?;
        *parts.get_mut(at)? = &number;
        parts.insert(at, LOCAL_EXPERT);
        let held = Held { name: parts.join("."), weights };
        self.held(&held, &weight)
    }

    fn held(&mut self, held: &Held, weight: &WeightRef) -> Option<V> {
        let Some(encoding) = (self.encodings)(&weight.name) else {
            self.fault(format!("{} has no encoding", weight.name));
            return None;
        };
        if let Some(v) = self.values_of.get(&held.name) {
            return Some(v.clone());
        }
        let (rows, cols) = weight.shape.matrix()?;
        if !encoding.transform.is_empty() {
            self.fault(format!("{} is stored rotated ({})", weight.name, encoding.transform));
            return None;
        }
        if !matches!(encoding.scheme, Scheme::Plain | Scheme::Affine) {
            self.fault(format!("{} has scheme {}", weight.name, encoding.scheme.name()));
            return None;
        }
        let known = |p: &PlaneSpec| {
            let levels = p.level(role::SCALE).or(p.level(role::MIN)).is_some();
            levels || [role::CODES, role::ZERO, role::TABLE].contains(&p.role.as_str())
        };
        if let Some(plane) = encoding.planes.iter().find(|p| !known(p)) {
            self.fault(format!("{} has a plane of {}", weight.name, plane.role));
            return None;
        }
        let mut codes = None;
        let (mut factors, mut minima) = (Vec::new(), Vec::new());
        let (mut zero, mut table) = (None, None);
        for (k, spec) in encoding.planes.iter().enumerate() {
            let v = self.plane(held, weight, &encoding, k)?;
            if spec.role == role::TABLE {
                table = Some(v);
                continue;
            }
            let v = if spec.role == role::CODES { v } else { self.f.convert(&v, "f32") };
            let v = self.spread(&v, spec, rows, cols);
            if spec.role == role::CODES {
                codes = Some(v);
            } else if spec.role == role::ZERO {
                zero = Some(v);
            } else if spec.level(role::SCALE).is_some() {
                factors.push(v);
            } else {
                minima.push(v);
            }
        }
        let codes = codes?;
        let mut x = match table {
            Some(table) => {
                let n = table.shape.iter().product();
                let table = self.f.convert(&table, "f32");
                let table = self.f.reshape(&table, &[n]);
                let at = self.f.convert(&codes, "i32");
                let at = self.f.reshape(&at, &[rows * cols]);
                let all = self.f.take(&table, &at);
                self.f.reshape(&all, &[rows, cols])
            }
            None => self.f.convert(&codes, "f32"),
        };
        if let Some(zero) = zero {
            x = self.f.binary("subtract", &x, &zero);
        }
        // In the order that the encoding defines: rounding depends on it.
        for factor in &factors {
            x = self.f.binary("multiply", &x, factor);
        }
        if let Some((first, rest)) = minima.split_first() {
            let mut least = first.clone();
            for more in rest {
                least = self.f.binary("multiply", &least, more);
            }
            x = self.f.binary("subtract", &x, &least);
        }
        self.values_of.insert(held.name.clone(), x.clone());
        Some(x)
    }

    /// The weight as a vector of f32.
    pub(super) fn vector(&mut self, id: WeightId) -> Option<V> {
        let m = self.matrix(id)?;
        let n = m.shape.iter().product();
        Some(self.f.reshape(&m, &[n]))
    }

    /// One value for each element of the weight: every grid element repeated over its block.
    fn spread(&mut self, v: &V, spec: &PlaneSpec, rows: u64, cols: u64) -> V {
        let PlaneLayout::Tiled { block } = spec.layout else { return v.clone() };
        let whole = |b: u64, n: u64| if b == 0 { n.max(1) } else { b };
        let (r, c) = (whole(block[0], rows), whole(block[1], cols));
        if (r, c) == (1, 1) {
            return v.clone();
        }
        let [gr, gc] = v.shape[..] else { return v.clone() };
        let tiled = self.f.broadcast(v, &[0, 2], &[gr, r, gc, c]);
        let all = self.f.reshape(&tiled, &[gr * r, gc * c]);
        let all = self.f.slice(&all, 0, 0, rows);
        self.f.slice(&all, 1, 0, cols)
    }
}
