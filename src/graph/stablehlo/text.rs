//! A typed writer of StableHLO text: every value knows its shape and element type, every method appends one line.

use std::fmt::Write;

/// A value of the function: its name, extents and MLIR element type.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct V {
    pub name: String,
    pub shape: Vec<u64>,
    pub ty: &'static str,
}

impl V {
    pub(super) fn ty(&self) -> String {
        tensor(&self.shape, self.ty)
    }
}

/// `tensor<2x3xf32>`.
pub(super) fn tensor(shape: &[u64], ty: &str) -> String {
    let mut out = "tensor<".to_owned();
    for d in shape {
        let _ = write!(out, "{d}x"); // writing to a String cannot fail
    }
    out + ty + ">"
}

/// A float as MLIR reads it: with a dot, and bits where it has no digits.
pub(super) fn float(x: f64) -> String {
    let x = x as f32;
    if !x.is_finite() {
        return format!("0x{:08X}", x.to_bits());
    }
    let text = format!("{x:e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) if mantissa.contains('.') => format!("{mantissa}e{exponent}"),
        Some((mantissa, exponent)) => format!("{mantissa}.0e{exponent}"),
        None => text,
    }
}

/// `[0, 1]`.
fn list(values: &[u64]) -> String {
    let all: Vec<String> = values.iter().map(u64::to_string).collect();
    format!("[{}]", all.join(", "))
}

/// An argument of the main function.
pub(super) struct Argument {
    pub value: V,
    /// What `rad.name` says.
    pub name: String,
    /// The result that takes its buffer over.
    pub becomes: Option<usize>,
}

/// The main function of a module, in the making.
pub(super) struct Function {
    lines: Vec<String>,
    next: usize,
    replicas: u32,
    pub arguments: Vec<Argument>,
    pub results: Vec<(V, String)>,
}

impl Function {
    pub(super) fn new(replicas: u32) -> Function {
        Function {
            lines: Vec::new(),
            next: 0,
            replicas,
            arguments: Vec::new(),
            results: Vec::new(),
        }
    }

    fn fresh(&mut self, shape: &[u64], ty: &'static str) -> V {
        self.next += 1;
        V { name: format!("%{}", self.next), shape: shape.to_vec(), ty }
    }

    /// Adds `NAME = OPERATION`.
    fn put(&mut self, shape: &[u64], ty: &'static str, operation: String) -> V {
        let v = self.fresh(shape, ty);
        self.lines.push(format!("    {} = {operation}", v.name));
        v
    }

    pub(super) fn argument(&mut self, name: &str, shape: &[u64], ty: &'static str) -> V {
        let value = V { name: format!("%arg{}", self.arguments.len()), shape: shape.to_vec(), ty };
        let name = name.to_owned();
        self.arguments.push(Argument { value: value.clone(), name, becomes: None });
        value
    }

    // ---- constants

    pub(super) fn constant(&mut self, x: f64, shape: &[u64]) -> V {
        let t = tensor(shape, "f32");
        self.put(shape, "f32", format!("stablehlo.constant dense<{}> : {t}", float(x)))
    }

    pub(super) fn vector(&mut self, values: &[f32]) -> V {
        let shape = [values.len() as u64];
        let all: Vec<String> = values.iter().map(|x| float(f64::from(*x))).collect();
        let t = tensor(&shape, "f32");
        self.put(&shape, "f32", format!("stablehlo.constant dense<[{}]> : {t}", all.join(", ")))
    }

    pub(super) fn integer(&mut self, x: i64, shape: &[u64]) -> V {
        let t = tensor(shape, "i32");
        self.put(shape, "i32", format!("stablehlo.constant dense<{x}> : {t}"))
    }

    pub(super) fn iota(&mut self, shape: &[u64], axis: usize) -> V {
        let t = tensor(shape, "i32");
        self.put(shape, "i32", format!("stablehlo.iota dim = {axis} : {t}"))
    }

    // ---- elementwise

    pub(super) fn unary(&mut self, op: &str, x: &V) -> V {
        self.put(&x.shape, x.ty, format!("stablehlo.{op} {} : {}", x.name, x.ty()))
    }

    pub(super) fn binary(&mut self, op: &str, a: &V, b: &V) -> V {
        self.put(&a.shape, a.ty, format!("stablehlo.{op} {}, {} : {}", a.name, b.name, a.ty()))
    }

    /// `x op constant`.
    pub(super) fn scalar(&mut self, op: &str, x: &V, c: f64) -> V {
        let c = if x.ty == "f32" {
            self.constant(c, &x.shape)
        } else {
            self.integer(c as i64, &x.shape)
        };
        self.binary(op, x, &c)
    }

    /// Limited to `-limit ..= limit`.
    pub(super) fn clamp(&mut self, x: &V, limit: f64) -> V {
        let (low, high) = (self.constant(-limit, &x.shape), self.constant(limit, &x.shape));
        let x = self.binary("maximum", x, &low);
        self.binary("minimum", &x, &high)
    }

    pub(super) fn compare(&mut self, how: &str, a: &V, b: &V) -> V {
        let kind = if a.ty.starts_with('f') || a.ty == "bf16" { "FLOAT" } else { "SIGNED" };
        let result = tensor(&a.shape, "i1");
        let text = format!(
            "stablehlo.compare {how}, {}, {}, {kind} : ({}, {}) -> {result}",
            a.name,
            b.name,
            a.ty(),
            b.ty()
        );
        self.put(&a.shape, "i1", text)
    }

    pub(super) fn select(&mut self, which: &V, a: &V, b: &V) -> V {
        let text = format!(
            "stablehlo.select {}, {}, {} : {}, {}",
            which.name,
            a.name,
            b.name,
            which.ty(),
            a.ty()
        );
        self.put(&a.shape, a.ty, text)
    }

    pub(super) fn convert(&mut self, x: &V, ty: &'static str) -> V {
        if x.ty == ty {
            return x.clone();
        }
        let t = tensor(&x.shape, ty);
        self.put(&x.shape, ty, format!("stablehlo.convert {} : ({}) -> {t}", x.name, x.ty()))
    }

    pub(super) fn bitcast(&mut self, x: &V, shape: &[u64], ty: &'static str) -> V {
        let t = tensor(shape, ty);
        self.put(shape, ty, format!("stablehlo.bitcast_convert {} : ({}) -> {t}", x.name, x.ty()))
    }

    // ---- shapes

    pub(super) fn reshape(&mut self, x: &V, shape: &[u64]) -> V {
        if x.shape == shape {
            return x.clone();
        }
        let t = tensor(shape, x.ty);
        self.put(shape, x.ty, format!("stablehlo.reshape {} : ({}) -> {t}", x.name, x.ty()))
    }

    /// Operand axis i becomes result axis `axes[i]`.
    pub(super) fn broadcast(&mut self, x: &V, axes: &[u64], shape: &[u64]) -> V {
        let t = tensor(shape, x.ty);
        let text = format!(
            "stablehlo.broadcast_in_dim {}, dims = {} : ({}) -> {t}",
            x.name,
            list(axes),
            x.ty()
        );
        self.put(shape, x.ty, text)
    }

    pub(super) fn transpose(&mut self, x: &V, order: &[usize]) -> V {
        let shape: Vec<u64> = order.iter().filter_map(|i| x.shape.get(*i).copied()).collect();
        let axes: Vec<u64> = order.iter().map(|i| *i as u64).collect();
        let t = tensor(&shape, x.ty);
        let text =
            format!("stablehlo.transpose {}, dims = {} : ({}) -> {t}", x.name, list(&axes), x.ty());
        self.put(&shape, x.ty, text)
    }

    /// Rows `from..to` of one axis.
    pub(super) fn slice(&mut self, x: &V, axis: usize, from: u64, to: u64) -> V {
        if from == 0 && x.shape.get(axis) == Some(&to) {
            return x.clone();
        }
        let mut shape = x.shape.clone();
        let mut ranges = Vec::new();
        for (i, d) in x.shape.iter().enumerate() {
            let (a, b) = if i == axis { (from, to) } else { (0, *d) };
            ranges.push(format!("{a}:{b}"));
            if let Some(slot) = shape.get_mut(i) {
                *slot = b - a;
            }
        }
        let t = tensor(&shape, x.ty);
        let text =
            format!("stablehlo.slice {} [{}] : ({}) -> {t}", x.name, ranges.join(", "), x.ty());
        self.put(&shape, x.ty, text)
    }

    pub(super) fn concatenate(&mut self, parts: &[&V], axis: usize) -> V {
        let Some((first, _)) = parts.split_first() else { return self.constant(0.0, &[]) };
        let mut shape = first.shape.clone();
        if let Some(slot) = shape.get_mut(axis) {
            *slot = parts.iter().filter_map(|p| p.shape.get(axis)).sum();
        }
        let names: Vec<&str> = parts.iter().map(|p| p.name.as_str()).collect();
        let types: Vec<String> = parts.iter().map(|p| p.ty()).collect();
        let t = tensor(&shape, first.ty);
        let text = format!(
            "stablehlo.concatenate {}, dim = {axis} : ({}) -> {t}",
            names.join(", "),
            types.join(", ")
        );
        self.put(&shape, first.ty, text)
    }

    /// One row of axis `axis`, at a run-time index.
    pub(super) fn dynamic_row(&mut self, x: &V, axis: usize, at: &V) -> V {
        let zero = self.integer(0, &[]);
        let mut shape = x.shape.clone();
        if let Some(slot) = shape.get_mut(axis) {
            *slot = 1;
        }
        let names: Vec<&str> =
            (0..x.shape.len()).map(|i| if i == axis { &*at.name } else { &*zero.name }).collect();
        let types = vec!["tensor<i32>"; x.shape.len()].join(", ");
        let t = tensor(&shape, x.ty);
        let text = format!(
            "stablehlo.dynamic_slice {}, {}, sizes = {} : ({}, {types}) -> {t}",
            x.name,
            names.join(", "),
            list(&shape),
            x.ty()
        );
        self.put(&shape, x.ty, text)
    }

    // ---- sums and products

    /// Batch axes, then contracted axes, of both operands; in f32.
    pub(super) fn dot(&mut self, a: &V, b: &V, batch: [&[u64]; 2], contract: [&[u64]; 2]) -> V {
        let free = |v: &V, side: usize| -> Vec<u64> {
            let taken = |i: &usize| {
                let i = *i as u64;
                batch[side].contains(&i) || contract[side].contains(&i)
            };
            (0..v.shape.len())
                .filter(|i| !taken(i))
                .filter_map(|i| v.shape.get(i).copied())
                .collect()
        };
        let mut shape: Vec<u64> =
            batch[0].iter().filter_map(|i| a.shape.get(*i as usize).copied()).collect();
        shape.extend(free(a, 0));
        shape.extend(free(b, 1));
        let batching = if batch[0].is_empty() {
            String::new()
        } else {
            format!("batching_dims = {} x {}, ", list(batch[0]), list(batch[1]))
        };
        let t = tensor(&shape, "f32");
        let text = format!(
            "stablehlo.dot_general {}, {}, {batching}contracting_dims = {} x {}, precision = [HIGHEST, HIGHEST] : ({}, {}) -> {t}",
            a.name,
            b.name,
            list(contract[0]),
            list(contract[1]),
            a.ty(),
            b.ty()
        );
        self.put(&shape, "f32", text)
    }

    /// `add`, `maximum` or `minimum` over one axis of f32, `or` over i1.
    pub(super) fn reduce(&mut self, op: &str, x: &V, axis: usize) -> V {
        let start = match (op, x.ty) {
            ("add", _) => self.constant(0.0, &[]),
            ("maximum", "i32") => self.integer(i64::from(i32::MIN), &[]),
            ("maximum", _) => self.constant(f64::NEG_INFINITY, &[]),
            ("minimum", _) => self.constant(f64::INFINITY, &[]),
            _ => self.put(&[], "i1", "stablehlo.constant dense<false> : tensor<i1>".to_owned()),
        };
        let mut shape = x.shape.clone();
        shape.remove(axis.min(shape.len().saturating_sub(1)));
        let t = tensor(&shape, x.ty);
        let text = format!(
            "stablehlo.reduce({} init: {}) applies stablehlo.{op} across dimensions = [{axis}] : ({}, {}) -> {t}",
            x.name,
            start.name,
            x.ty(),
            start.ty()
        );
        self.put(&shape, x.ty, text)
    }

    /// `reduce` over the last axis, broadcast back.
    pub(super) fn over_last(&mut self, op: &str, x: &V) -> V {
        let axis = x.shape.len().saturating_sub(1);
        let r = self.reduce(op, x, axis);
        let axes: Vec<u64> = (0..axis as u64).collect();
        self.broadcast(&r, &axes, &x.shape)
    }

    /// Softmax over the last axis.
    pub(super) fn softmax(&mut self, x: &V) -> V {
        let most = self.over_last("maximum", x);
        let x = self.binary("subtract", x, &most);
        let e = self.unary("exponential", &x);
        let sum = self.over_last("add", &e);
        self.binary("divide", &e, &sum)
    }

    // ---- indexing

    /// Slices of `x` at run-time indices of its first axis: `at [n]` i32 gives `[n, rest of x]`.
    pub(super) fn take(&mut self, x: &V, at: &V) -> V {
        let n = at.shape.iter().product::<u64>();
        let at = self.reshape(at, &[n, 1]);
        let rest: Vec<u64> = x.shape.iter().skip(1).copied().collect();
        let mut shape = vec![n];
        shape.extend(&rest);
        let mut sizes = vec![1];
        sizes.extend(&rest);
        let offset: Vec<u64> = (1..=rest.len() as u64).collect();
        let offset = match offset.is_empty() {
            true => String::new(),
            false => format!("offset_dims = {}, ", list(&offset)),
        };
        let sizes: Vec<String> = sizes.iter().map(u64::to_string).collect();
        let t = tensor(&shape, x.ty);
        let text = format!(
            "\"stablehlo.gather\"({}, {}) <{{dimension_numbers = #stablehlo.gather<{offset}collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes = array<i64: {}>}}> : ({}, {}) -> {t}",
            x.name,
            at.name,
            sizes.join(", "),
            x.ty(),
            at.ty()
        );
        self.put(&shape, x.ty, text)
    }

    /// `x[a_i, :, b_i, :] = rows_i`; an index outside drops its row. `at [n, 2]` i32, `rows [n, heads, width]`.
    pub(super) fn write_rows(&mut self, x: &V, at: &V, rows: &V) -> V {
        let v = self.fresh(&x.shape, x.ty);
        let t = x.ty;
        self.lines.push(format!(
            "    {} = \"stablehlo.scatter\"({}, {}, {}) <{{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], inserted_window_dims = [0, 2], scatter_dims_to_operand_dims = [0, 2], index_vector_dim = 1>}}> ({{\n    ^bb0(%old: tensor<{t}>, %new: tensor<{t}>):\n      stablehlo.return %new : tensor<{t}>\n    }}) : ({}, {}, {}) -> {}",
            v.name, x.name, at.name, rows.name, x.ty(), at.ty(), rows.ty(), x.ty()
        ));
        v
    }

    /// The k largest of each row, largest first, and their columns; equal ones by column.
    pub(super) fn top(&mut self, x: &V, k: u64) -> (V, V) {
        let at = self.iota(&x.shape, 1);
        self.next += 1;
        let base = format!("%s{}", self.next);
        let (xt, it) = (x.ty(), at.ty());
        self.lines.push(format!(
            "    {base}:2 = \"stablehlo.sort\"({}, {}) <{{dimension = 1 : i64, is_stable = true}}> ({{\n    ^bb0(%a: tensor<f32>, %b: tensor<f32>, %i: tensor<i32>, %j: tensor<i32>):\n      %g = stablehlo.compare GT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>\n      stablehlo.return %g : tensor<i1>\n    }}) : ({xt}, {it}) -> ({xt}, {it})",
            x.name, at.name
        ));
        let values = V { name: format!("{base}#0"), shape: x.shape.clone(), ty: "f32" };
        let columns = V { name: format!("{base}#1"), shape: x.shape.clone(), ty: "i32" };
        (self.slice(&values, 1, 0, k), self.slice(&columns, 1, 0, k))
    }

    // ---- collectives

    fn groups(&self) -> String {
        let n = self.replicas;
        let all: Vec<String> = (0..n).map(|i| i.to_string()).collect();
        format!("replica_groups = dense<[[{}]]> : tensor<1x{n}xi64>", all.join(", "))
    }

    pub(super) fn all_reduce(&mut self, x: &V) -> V {
        let v = self.fresh(&x.shape, x.ty);
        let (t, groups) = (x.ty, self.groups());
        self.lines.push(format!(
            "    {} = \"stablehlo.all_reduce\"({}) ({{\n    ^bb0(%a: tensor<{t}>, %b: tensor<{t}>):\n      %s = stablehlo.add %a, %b : tensor<{t}>\n      stablehlo.return %s : tensor<{t}>\n    }}) {{{groups}}} : ({}) -> {}",
            v.name, x.name, x.ty(), x.ty()
        ));
        v
    }

    pub(super) fn all_gather(&mut self, x: &V) -> V {
        let axis = x.shape.len().saturating_sub(1);
        let mut shape = x.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last *= u64::from(self.replicas);
        }
        let (t, groups) = (tensor(&shape, x.ty), self.groups());
        let text = format!(
            "\"stablehlo.all_gather\"({}) {{all_gather_dim = {axis} : i64, {groups}}} : ({}) -> {t}",
            x.name,
            x.ty()
        );
        self.put(&shape, x.ty, text)
    }

    /// The whole module.
    pub(super) fn module(&self, name: &str) -> String {
        let arguments: Vec<String> = self
            .arguments
            .iter()
            .map(|a| {
                let becomes = a
                    .becomes
                    .map_or(String::new(), |k| format!(", tf.aliasing_output = {k} : i32"));
                format!("{}: {} {{rad.name = \"{}\"{becomes}}}", a.value.name, a.value.ty(), a.name)
            })
            .collect();
        let results: Vec<String> = self
            .results
            .iter()
            .map(|(v, name)| format!("{} {{rad.name = \"{name}\"}}", v.ty()))
            .collect();
        let names: Vec<&str> = self.results.iter().map(|(v, _)| v.name.as_str()).collect();
        let types: Vec<String> = self.results.iter().map(|(v, _)| v.ty()).collect();
        format!(
            "module @{name} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = {} : i32}} {{\n  func.func public @main(\n      {}\n  ) -> (\n      {}\n  ) {{\n{}\n    return {} : {}\n  }}\n}}\n",
            self.replicas,
            arguments.join(",\n      "),
            results.join(",\n      "),
            self.lines.join("\n"),
            names.join(", "),
            types.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_carry_a_dot_and_odd_values_their_bits() {
        assert_eq!(float(1e-6), "1.0e-6");
        assert_eq!(float(0.25), "2.5e-1");
        assert_eq!(float(-3.0), "-3.0e0");
        assert_eq!(float(f64::NEG_INFINITY), "0xFF800000");
    }

    #[test]
    fn types_read_as_mlir_writes_them() {
        assert_eq!(tensor(&[2, 3], "f32"), "tensor<2x3xf32>");
        assert_eq!(tensor(&[], "i32"), "tensor<i32>");
    }
}
