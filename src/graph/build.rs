//! Writing programs: a builder that types every value as it is made.

use std::collections::BTreeMap;

use super::infer::{Context, infer};
use super::ir::{
    KvTensor, Node, Op, Port, Program, ProgramKind, ValueId, ValueType, WeightId, WeightRef,
};
use crate::tensor::{DType, Shape};

/// A program in the making.
///
/// A mistake of the caller (operands that do not fit) is kept and comes out of [`Builder::finish`]; values after it are
/// scalars, so that one mistake is reported, not its echo.
pub(super) struct Builder<'a> {
    program: Program,
    /// Element type of float values.
    float: DType,
    kv: &'a [KvTensor],
    by_name: BTreeMap<String, WeightId>,
    fault: Option<String>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        name: String,
        kind: ProgramKind,
        devices: u32,
        float: DType,
        kv: &'a [KvTensor],
    ) -> Builder<'a> {
        let program = Program {
            name,
            kind,
            devices,
            weights: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            values: Vec::new(),
            nodes: Vec::new(),
        };
        Builder { program, float, kv, by_name: BTreeMap::new(), fault: None }
    }

    fn value(&mut self, dtype: DType, shape: Shape) -> ValueId {
        let id = ValueId(u32::try_from(self.program.values.len()).unwrap_or(u32::MAX));
        self.program.values.push(ValueType { dtype, shape });
        id
    }

    /// A named input.
    pub(super) fn input(&mut self, name: &str, dtype: DType, shape: impl Into<Shape>) -> ValueId {
        let value = self.value(dtype, shape.into());
        self.program.inputs.push(Port { name: name.to_owned(), value });
        value
    }

    /// A named input of the program's float type.
    pub(super) fn float_input(&mut self, name: &str, shape: impl Into<Shape>) -> ValueId {
        self.input(name, self.float, shape)
    }

    /// Names a value as an output.
    pub(super) fn output(&mut self, name: &str, value: ValueId) {
        self.program.outputs.push(Port { name: name.to_owned(), value });
    }

    /// Extents of a value.
    pub(super) fn shape(&self, value: ValueId) -> Vec<u64> {
        self.program.value(value).map(|v| v.shape.extents().to_vec()).unwrap_or_default()
    }

    /// A weight, listed once however often it is read.
    pub(super) fn weight(&mut self, weight: WeightRef) -> WeightId {
        if let Some(id) = self.by_name.get(&weight.name) {
            return *id;
        }
        let id = WeightId(u32::try_from(self.program.weights.len()).unwrap_or(u32::MAX));
        self.by_name.insert(weight.name.clone(), id);
        self.program.weights.push(weight);
        id
    }

    /// Adds an operation; `wanted` is the result's shape where the operation does not fix it.
    pub(super) fn push(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        wanted: Option<Shape>,
    ) -> Vec<ValueId> {
        let context =
            Context { weights: &self.program.weights, kv: self.kv, devices: self.program.devices };
        let types: Vec<&ValueType> =
            inputs.iter().filter_map(|id| self.program.value(*id)).collect();
        let mut results = match infer(&op, &types, wanted.as_ref(), &context) {
            Ok(results) => results,
            Err(why) => {
                self.fault.get_or_insert_with(|| {
                    format!(
                        "{}, operation {}: {}: {why}",
                        self.program.name,
                        self.program.nodes.len(),
                        op.name()
                    )
                });
                vec![ValueType { dtype: self.float, shape: Shape::from([]) }; 2]
            }
        };
        if let Op::Embed { .. } | Op::EmbedAxes { .. } = op {
            results.iter_mut().for_each(|v| v.dtype = self.float);
        }
        let outputs: Vec<ValueId> =
            results.into_iter().map(|v| self.value(v.dtype, v.shape)).collect();
        self.program.nodes.push(Node { op, inputs: inputs.to_vec(), outputs: outputs.clone() });
        outputs
    }

    /// Adds an operation with one result.
    pub(super) fn op(&mut self, op: Op, inputs: &[ValueId]) -> ValueId {
        self.first(op, inputs, None)
    }

    /// Adds a reshape, or nothing when the shape is there already.
    pub(super) fn reshape(&mut self, x: ValueId, shape: impl Into<Shape>) -> ValueId {
        let shape = shape.into();
        if self.shape(x) == shape.extents() {
            return x;
        }
        self.first(Op::Reshape, &[x], Some(shape))
    }

    /// `len` columns from `start`.
    pub(super) fn columns(&mut self, x: ValueId, start: u64, len: u64) -> ValueId {
        let mut extents = self.shape(x);
        if let Some(last) = extents.last_mut() {
            *last = len;
        }
        self.first(Op::Columns { start }, &[x], Some(Shape::new(extents)))
    }

    /// Sums over devices, if there are several.
    pub(super) fn reduce(&mut self, x: ValueId) -> ValueId {
        if self.program.devices == 1 { x } else { self.op(Op::AllReduce, &[x]) }
    }

    /// Joins the devices' columns, of which `keep` are real; on one device drops padding, if there is any.
    pub(super) fn gather(&mut self, x: ValueId, keep: u64) -> ValueId {
        if self.program.devices > 1 {
            return self.op(Op::AllGather { keep }, &[x]);
        }
        if self.shape(x).last() == Some(&keep) { x } else { self.columns(x, 0, keep) }
    }

    fn first(&mut self, op: Op, inputs: &[ValueId], wanted: Option<Shape>) -> ValueId {
        match self.push(op, inputs, wanted).first() {
            Some(id) => *id,
            None => {
                let name = self.program.name.clone();
                self.fault.get_or_insert(format!("{name}: an operation without a result"));
                ValueId(0)
            }
        }
    }

    /// The program.
    ///
    /// # Errors
    /// The first mistake of a lowering.
    pub(super) fn finish(self) -> Result<Program, String> {
        match self.fault {
            Some(fault) => Err(fault),
            None => Ok(self.program),
        }
    }
}
