//! The answer as a picture: memory of every device as stacked bars, and how long so many sequences can be.
//!
//! Plain SVG 1.1 without scripts or fonts of its own; colours follow the reader's light or dark setting. The text is a
//! function of the answer alone.

use std::fmt::Write;

use super::sum::{DeviceSum, Estimate};
use crate::diag::{count, size};

const WIDTH: f64 = 760.0;
/// Where bars and the curve begin and end.
const LEFT: f64 = 110.0;
const RIGHT: f64 = 740.0;
const BAR: f64 = 18.0;
const ROW: f64 = 26.0;
/// Rows of devices that are drawn; equal neighbours share a row.
const MAX_ROWS: usize = 48;
const PLOT: f64 = 220.0;

/// Colours of terms in their order, apart for people who see no red or no green (Okabe and Ito's set, 2008).
const COLOURS: [&str; 7] =
    ["#0072b2", "#56b4e9", "#cc79a7", "#e69f00", "#d55e00", "#f0e442", "#999999"];
const BLOCKS: &str = "#009e73";

const STYLE: &str = "
  svg { color-scheme: light dark; }
  .page { fill: #ffffff; }
  .ink { fill: #1f2328; font: 12px ui-sans-serif, system-ui, sans-serif; }
  .head { font-weight: 600; font-size: 14px; }
  .soft { fill: #59636e; }
  .free { fill: #eaeef2; stroke: #8c959f; stroke-width: 0.5; }
  .line { stroke: #8c959f; stroke-width: 1; fill: none; }
  .edge { stroke: #ffffff; stroke-width: 0.5; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117; }
    .ink { fill: #f0f6fc; }
    .soft { fill: #9198a1; }
    .free { fill: #21262d; stroke: #656c76; }
    .line { stroke: #656c76; }
    .edge { stroke: #0d1117; }
  }
";

/// The rows that are drawn.
fn shown<T>(rows: &[T]) -> &[T] {
    rows.get(..MAX_ROWS).unwrap_or(rows)
}

/// The picture of an answer, as one SVG document that ends in a line feed. `title` is shown above it.
pub fn svg(e: &Estimate, title: &str) -> String {
    let rows: Vec<&[DeviceSum]> = e.devices.chunk_by(|a, b| a.terms == b.terms).collect();
    let shown = shown(&rows);
    let legend = Legend::of(e);
    let bars = 62.0;
    let bars_end =
        bars + ROW * shown.len() as f64 + if shown.len() < rows.len() { 18.0 } else { 0.0 };
    let legend_end = bars_end + 14.0 + 18.0 * legend.lines() as f64;
    let plot = legend_end + 44.0;
    let height = plot + PLOT + 48.0;
    let mut draw = Drawing { out: String::new() };
    let out = &mut draw;
    out.line(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH:.0} {height:.0}\" width=\"{WIDTH:.0}\" height=\"{height:.0}\" role=\"img\">"
    ));
    out.line(format!("<title>{}</title>", escape(title)));
    out.line(format!(
        "<desc>{} blocks of KV cache, {} tokens, on {} devices of {}</desc>",
        count(e.blocks),
        count(e.tokens),
        e.devices.len(),
        escape(&e.target)
    ));
    out.line(format!("<style>{STYLE}</style>"));
    out.line("<rect class=\"page\" width=\"100%\" height=\"100%\"/>".to_owned());
    out.text(14.0, 24.0, "ink head", title);
    let answer = format!(
        "{} blocks · {} tokens · {:.2} contexts of {}",
        count(e.blocks),
        count(e.tokens),
        e.contexts,
        count(e.max_seq_len)
    );
    out.text(14.0, 44.0, "ink soft", &answer);
    for (i, run) in shown.iter().enumerate() {
        device_row(out, e, run, bars + ROW * i as f64, &legend);
    }
    if shown.len() < rows.len() {
        let more: usize = rows.iter().skip(MAX_ROWS).map(|r| r.len()).sum();
        let text = format!("{} more devices are not drawn", count(more as u64));
        out.text(LEFT, bars_end - 4.0, "ink soft", &text);
    }
    legend.draw(out, bars_end + 14.0);
    curve(out, e, plot);
    out.line("</svg>".to_owned());
    draw.out
}

/// What a segment stands for, in the order of bars, and how large it is on the device that decides.
struct Legend {
    names: Vec<String>,
    sizes: Vec<u64>,
    blocks: u64,
}

impl Legend {
    fn of(e: &Estimate) -> Legend {
        let mut names: Vec<String> = Vec::new();
        for term in e.devices.iter().flat_map(|d| &d.terms) {
            if !names.contains(&term.name) {
                names.push(term.name.clone());
            }
        }
        let decisive = e.decisive().map(|d| d.terms.as_slice()).unwrap_or_default();
        let of = |name: &String| decisive.iter().find(|t| t.name == *name).map_or(0, |t| t.bytes);
        let sizes = names.iter().map(of).collect();
        Legend { names, sizes, blocks: block_bytes(e) }
    }

    fn colour(&self, name: &str) -> &'static str {
        let at = self.names.iter().position(|n| n == name).unwrap_or(0);
        COLOURS.get(at % COLOURS.len()).copied().unwrap_or("#999999")
    }

    /// Two more stand for blocks and for memory that nothing takes.
    fn lines(&self) -> usize {
        (self.names.len() + 2).div_ceil(4)
    }

    fn draw(&self, out: &mut Drawing, top: f64) {
        let own = self.names.iter().zip(&self.sizes);
        let mut items: Vec<(Option<&str>, String)> = own
            .map(|(name, bytes)| (Some(self.colour(name)), format!("{name} {}", size(*bytes))))
            .collect();
        items.push((Some(BLOCKS), format!("KV blocks {}", size(self.blocks))));
        items.push((None, "reserve, not used".to_owned()));
        for (i, (colour, text)) in items.iter().enumerate() {
            let x = LEFT + 157.0 * (i % 4) as f64;
            let y = top + 18.0 * (i / 4) as f64;
            out.rect(x, y, 11.0, 11.0, *colour, None);
            out.text(x + 16.0, y + 10.0, "ink", text);
        }
    }
}

/// Bytes that the blocks take on every device.
fn block_bytes(e: &Estimate) -> u64 {
    let left = e.decisive().map_or(0, |d| u64::try_from(d.left).unwrap_or(0));
    if e.blocks == 0 { 0 } else { left.saturating_sub(e.left_over) }
}

/// One bar: what is reserved, every term, blocks, and what is left of the whole memory.
fn device_row(out: &mut Drawing, e: &Estimate, run: &[DeviceSum], top: f64, legend: &Legend) {
    let [first, ..] = run else { return };
    let last = run.last().unwrap_or(first);
    let label = match run.len() {
        1 => format!("device {}", first.device),
        _ => format!("device {}–{}", first.device, last.device),
    };
    out.text(14.0, top + 13.0, "ink", &label);
    let taken = |d: &DeviceSum| d.terms.iter().fold(0u64, |sum, t| sum.saturating_add(t.bytes));
    let most = e.devices.iter().map(taken).max().unwrap_or(0);
    // A model that does not fit has longer bars than the memory.
    let scale = e.capacity.memory.max(most.saturating_add(e.capacity.reserve)).max(1);
    let wide = |bytes: u64| bytes as f64 / scale as f64 * (RIGHT - LEFT);
    out.rect(LEFT, top, wide(e.capacity.memory), BAR, None, Some("memory of the device"));
    let mut x = LEFT + wide(e.capacity.reserve);
    for term in &first.terms {
        let tip = format!("{}: {}", term.name, size(term.bytes));
        out.rect(x, top, wide(term.bytes), BAR, Some(legend.colour(&term.name)), Some(&tip));
        x += wide(term.bytes);
    }
    let blocks = block_bytes(e);
    if blocks > 0 {
        let tip = format!("{} KV blocks: {}", count(e.blocks), size(blocks));
        out.rect(x, top, wide(blocks), BAR, Some(BLOCKS), Some(&tip));
    }
    let end = LEFT + wide(e.capacity.reserve.saturating_add(e.capacity.budget));
    if e.capacity.said.is_some() {
        out.line(format!(
            "<path class=\"line\" d=\"M{end:.1} {:.1}V{:.1}\"><title>memory budget: {}</title></path>",
            top - 3.0,
            top + BAR + 3.0,
            size(e.capacity.budget)
        ));
    }
}

/// How long all of so many sequences can be.
fn curve(out: &mut Drawing, e: &Estimate, top: f64) {
    out.text(14.0, top - 18.0, "ink head", "longest context for sequences served at a time");
    let bottom = top + PLOT;
    let high = e.max_seq_len.max(1);
    let y = |tokens: u64| bottom - tokens as f64 / high as f64 * PLOT;
    for part in 0..=4u64 {
        let tokens = high / 4 * part;
        let at = y(tokens);
        out.line(format!(
            "<path class=\"line\" opacity=\"0.4\" d=\"M{LEFT:.1} {at:.1}H{RIGHT:.1}\"/>"
        ));
        out.line(format!(
            "<text class=\"ink soft\" text-anchor=\"end\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            count(tokens)
        ));
    }
    let steps = e.concurrency.len().max(2) - 1;
    let x = |i: usize| LEFT + 30.0 + (RIGHT - LEFT - 80.0) * i as f64 / steps as f64;
    let mut path = String::new();
    for (i, point) in e.concurrency.iter().enumerate() {
        // Writing to a String cannot fail.
        let _ =
            write!(path, "{}{:.1} {:.1}", if i == 0 { "M" } else { "L" }, x(i), y(point.tokens));
    }
    if !path.is_empty() {
        out.line(format!(
            "<path d=\"{path}\" fill=\"none\" stroke=\"{BLOCKS}\" stroke-width=\"2\"/>"
        ));
    }
    for (i, point) in e.concurrency.iter().enumerate() {
        let (x, y) = (x(i), y(point.tokens));
        out.line(format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{BLOCKS}\"/>"));
        out.line(format!(
            "<text class=\"ink\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            x + 6.0,
            y - 6.0,
            count(point.tokens)
        ));
        out.line(format!(
            "<text class=\"ink soft\" text-anchor=\"middle\" x=\"{x:.1}\" y=\"{:.1}\">{}</text>",
            bottom + 18.0,
            count(point.sequences)
        ));
    }
    out.line(format!(
        "<text class=\"ink soft\" text-anchor=\"middle\" x=\"{:.1}\" y=\"{:.1}\">sequences</text>",
        (LEFT + RIGHT) / 2.0,
        bottom + 36.0
    ));
}

struct Drawing {
    out: String,
}

impl Drawing {
    fn line(&mut self, text: String) {
        self.out.push_str(&text);
        self.out.push('\n');
    }

    fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        self.line(format!(
            "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>",
            escape(text)
        ));
    }

    /// A rectangle with a colour, or one that stands for free memory, and what a pointer over it shows.
    fn rect(&mut self, x: f64, y: f64, w: f64, h: f64, colour: Option<&str>, tip: Option<&str>) {
        let paint = match colour {
            Some(colour) => format!("class=\"edge\" fill=\"{colour}\""),
            None => "class=\"free\"".to_owned(),
        };
        let at =
            format!("<rect {paint} x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\"");
        self.line(match tip {
            Some(tip) => format!("{at}><title>{}</title></rect>", escape(tip)),
            None => format!("{at}/>"),
        });
    }
}

/// Text as XML shows it; characters that XML 1.0 has no form for become blanks.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => out.push(' '),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_rows_are_drawn_as_fit() {
        assert_eq!([0, 47, 48, 49, 1000].map(|n| shown(&vec![0; n]).len()), [0, 47, 48, 48, 48]);
    }

    #[test]
    fn names_from_outside_stay_text() {
        assert_eq!(escape("a<b>&\"c\"\u{0}\u{fffe}é"), "a&lt;b&gt;&amp;&quot;c&quot;  é");
    }
}
