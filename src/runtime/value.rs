//! Values of a run: dense, row-major, floats in f32 and everything else as i64.

use std::sync::Arc;

use crate::diag::{Failure, FailureKind, Result};

/// A tensor of one device. Copies share their elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    shape: Vec<usize>,
    data: Data,
}

#[derive(Debug, Clone, PartialEq)]
enum Data {
    Float(Arc<Vec<f32>>),
    Int(Arc<Vec<i64>>),
}

/// An error of this stage itself, or of programs that its checks do not cover.
pub(super) fn fault(what: impl std::fmt::Display) -> Failure {
    Failure::plain(FailureKind::Failed, format!("the programs cannot be run: {what}"))
}

impl Value {
    /// Floats of that shape.
    ///
    /// # Errors
    /// Another number of elements than the shape has.
    pub fn floats(shape: impl Into<Vec<usize>>, data: impl Into<Arc<Vec<f32>>>) -> Result<Value> {
        let (shape, data) = (shape.into(), data.into());
        fits(&shape, data.len())?;
        Ok(Value { shape, data: Data::Float(data) })
    }

    /// Integers or booleans (0, 1) of that shape.
    ///
    /// # Errors
    /// Another number of elements than the shape has.
    pub fn ints(shape: impl Into<Vec<usize>>, data: impl Into<Arc<Vec<i64>>>) -> Result<Value> {
        let (shape, data) = (shape.into(), data.into());
        fits(&shape, data.len())?;
        Ok(Value { shape, data: Data::Int(data) })
    }

    /// An integer of rank 0.
    pub fn scalar(n: i64) -> Value {
        Value { shape: Vec::new(), data: Data::Int(Arc::new(vec![n])) }
    }

    /// Extents, slowest first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its floats.
    ///
    /// # Errors
    /// It holds integers.
    pub fn as_floats(&self) -> Result<&[f32]> {
        self.shared_floats().map(|data| data.as_slice())
    }

    /// Its integers.
    ///
    /// # Errors
    /// It holds floats.
    pub fn as_ints(&self) -> Result<&[i64]> {
        match &self.data {
            Data::Int(data) => Ok(data),
            Data::Float(_) => Err(fault("floats where integers are needed")),
        }
    }

    pub(super) fn shared_floats(&self) -> Result<&Arc<Vec<f32>>> {
        match &self.data {
            Data::Float(data) => Ok(data),
            Data::Int(_) => Err(fault("integers where floats are needed")),
        }
    }

    /// Whether it holds floats.
    pub fn is_float(&self) -> bool {
        matches!(self.data, Data::Float(_))
    }

    /// The last extent; 1 for a scalar.
    pub fn columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The same shape with another last extent.
    pub(super) fn with_columns(&self, columns: usize) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = columns;
        }
        shape
    }

    /// The same elements in another shape.
    pub(super) fn reshaped(&self, shape: Vec<usize>) -> Result<Value> {
        let elements = match &self.data {
            Data::Float(data) => data.len(),
            Data::Int(data) => data.len(),
        };
        fits(&shape, elements)?;
        Ok(Value { shape, data: self.data.clone() })
    }

    /// Its four extents `[batch, rows, heads, width]`.
    pub(super) fn heads(&self) -> Result<[usize; 4]> {
        <[usize; 4]>::try_from(self.shape.as_slice()).map_err(|_| {
            fault(format!("{:?} where [batch, rows, heads, width] is needed", self.shape))
        })
    }
}

fn fits(shape: &[usize], elements: usize) -> Result<()> {
    if shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) == Some(elements) {
        return Ok(());
    }
    Err(fault(format!("{elements} elements for shape {shape:?}")))
}
