//! A device's sum while it grows. Every term has a name and says how it comes about.

use super::load::{MemoryModel, Part};
use super::sum::{DeviceSum, Term};
use super::{AREA, weight_words};
use crate::diag::{Diagnostic, Failure, FailureKind, Result};

/// The terms of one device, or of one of its chiplets.
pub(super) struct Terms<'a> {
    model: &'a MemoryModel,
    device: u32,
    chiplets: u64,
    terms: Vec<Term>,
}

impl<'a> Terms<'a> {
    /// None yet, of one of `chiplets` equal parts of a device.
    pub fn of(model: &'a MemoryModel, device: u32, chiplets: u64) -> Terms<'a> {
        Terms { model, device, chiplets: chiplets.max(1), terms: Vec::new() }
    }

    /// The decoder's weights. Engines that look embeddings up on the device hold a table that no program reads, too.
    pub fn decoder(self, holds_table: bool) -> Terms<'a> {
        let words = weight_words(self.model, self.device);
        let mut bytes = self.model.weight_bytes(Part::Decoder, self.device);
        if !holds_table {
            return self.share("weights", bytes, words);
        }
        bytes = bytes.saturating_add(self.model.weight_bytes(Part::Lookup, self.device));
        let words = words.split_once("; ").map_or(words.as_str(), |(first, _)| first);
        let how = format!("{words}, embedding included");
        self.share("weights", bytes, how)
    }

    /// The weights of the draft head or of the image encoder, if the device has any.
    pub fn part(self, part: Part) -> Terms<'a> {
        let name = match part {
            Part::Draft => "draft head",
            Part::Encoder => "image encoder",
            Part::Decoder => "weights",
            Part::Lookup | Part::Host => "host",
        };
        match self.model.weight_bytes(part, self.device) {
            0 => self,
            bytes => self.share(name, bytes, "its weights"),
        }
    }

    /// Bytes of the whole device, of which a chiplet has its share.
    pub fn share(self, name: &str, bytes: u64, how: impl Into<String>) -> Terms<'a> {
        let bytes = bytes.div_ceil(self.chiplets);
        self.add(name, bytes, how)
    }

    /// Bytes as they are.
    pub fn add(mut self, name: &str, bytes: u64, how: impl Into<String>) -> Terms<'a> {
        self.terms.push(Term { name: name.to_owned(), bytes, how: how.into() });
        self
    }

    /// Bytes as they are, left out where there are none.
    pub fn some(self, name: &str, bytes: u64, how: impl Into<String>) -> Terms<'a> {
        if bytes == 0 { self } else { self.add(name, bytes, how) }
    }

    /// Makes the terms so far one allocation in whole `unit`s; what that adds stands with the first, the largest.
    pub fn round_up(mut self, unit: u64) -> Terms<'a> {
        let all = self.taken();
        let more = all.div_ceil(unit.max(1)).saturating_mul(unit.max(1)).saturating_sub(all);
        if let Some(first) = self.terms.first_mut() {
            first.bytes = first.bytes.saturating_add(more);
        }
        self
    }

    fn taken(&self) -> u64 {
        self.terms.iter().fold(0u64, |sum, t| sum.saturating_add(t.bytes))
    }

    /// The sum: a budget less the terms.
    pub fn off(self, budget: u64) -> DeviceSum {
        let left = i128::from(budget) - i128::from(self.taken());
        let left = i64::try_from(left).unwrap_or(i64::MIN);
        DeviceSum { device: self.device, terms: self.terms, left }
    }
}

/// The sums of all devices.
pub(super) struct Sums {
    /// By device.
    pub devices: Vec<DeviceSum>,
    /// Index of the device with the least left, the first of equals.
    pub tightest: usize,
    /// That device's sum.
    pub decisive: DeviceSum,
}

impl Sums {
    /// Of every device.
    ///
    /// # Errors
    /// A model for no device.
    pub fn of(model: &MemoryModel, sum: impl Fn(u32) -> DeviceSum) -> Result<Sums> {
        let devices: Vec<DeviceSum> = (0..model.devices).map(sum).collect();
        let least = devices.iter().enumerate().min_by_key(|(i, d)| (d.left, *i));
        let Some((tightest, decisive)) = least.map(|(i, d)| (i, d.clone())) else {
            let problem = Diagnostic::new(AREA, "the model is for no devices");
            let problem = problem.help("use 1 device or more");
            return Err(Failure::one(
                FailureKind::Refused,
                "there is nothing to estimate",
                problem,
            ));
        };
        Ok(Sums { devices, tightest, decisive })
    }
}
