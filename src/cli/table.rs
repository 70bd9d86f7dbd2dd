//! Aligned columns without borders.

use comfy_table::{CellAlignment, Table, presets};

/// How a column aligns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Text.
    Left,
    /// Figures.
    Right,
}

/// Rows of cells, aligned by column, two spaces apart, without trailing blanks.
pub fn table(header: &[&str], align: &[Align], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    // Lines wrap where a reader's terminal wraps, not where a width was guessed.
    table.set_content_arrangement(comfy_table::ContentArrangement::Disabled);
    if header.iter().any(|h| !h.is_empty()) {
        table.set_header(header.iter().copied());
    }
    for row in rows {
        table.add_row(row);
    }
    for (i, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if align.get(i) == Some(&Align::Right) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut out = String::new();
    for line in table.to_string().lines() {
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_align_right_and_no_line_ends_in_blanks() {
        let rows = vec![
            vec!["a".into(), "1".into(), "x".into()],
            vec!["bcd".into(), "100".into(), String::new()],
        ];
        let text = table(&["", "n", ""], &[Align::Left, Align::Right, Align::Left], &rows);
        assert_eq!(text, "       n\na      1  x\nbcd  100\n");
    }
}
