//! What every device holds, as a table.

use radpack::diag::size;

use super::documents::DeviceDocument;
use super::table::{Align, table};

/// One line for each run of devices that hold equally much.
pub fn devices(devices: &[DeviceDocument]) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let same = |a: &DeviceDocument, b: &DeviceDocument| {
        (a.whole, a.shards, a.padding) == (b.whole, b.shards, b.padding)
    };
    for run in devices.chunk_by(same) {
        let [first, ..] = run else { continue };
        let name = match run {
            [one] => one.device.to_string(),
            [one, .., last] => format!("{}–{}", one.device, last.device),
            [] => continue,
        };
        rows.push(vec![
            name,
            size(first.bytes),
            size(first.whole),
            size(first.shards),
            size(first.padding),
        ]);
    }
    table(
        &["device", "weights", "whole", "pieces", "padding"],
        &[Align::Left, Align::Right, Align::Right, Align::Right, Align::Right],
        &rows,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_hold_equally_much_share_a_line() {
        let device = |device, shards| DeviceDocument {
            device,
            whole: 1 << 20,
            shards,
            padding: 512,
            bytes: (1 << 20) + shards,
        };
        let all = [device(0, 3 << 20), device(1, 1 << 20), device(2, 1 << 20)];
        assert_eq!(
            devices(&all),
            "device   weights     whole    pieces  padding\n\
             0       4.00 MiB  1.00 MiB  3.00 MiB    512 B\n\
             1–2     2.00 MiB  1.00 MiB  1.00 MiB    512 B\n"
        );
    }
}
