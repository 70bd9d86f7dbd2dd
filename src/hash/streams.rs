//! Digests of many streams of bytes.

use std::cmp::Reverse;
use std::io::{self, BufRead, Read};
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::{LANES, Sha256, WIDE};

/// Something to hash: how long it is, how it is opened, and what becomes of its digest.
pub trait Stream: Sync {
    /// Its bytes in order.
    type Input<'a>: BufRead
    where
        Self: 'a;
    /// What is made of the digest.
    type Output: Send;
    /// Why there is none.
    type Error: From<io::Error> + Send;

    /// Its length in bytes, to begin with the longest; a guess is good enough.
    fn bytes(&self) -> u64;

    /// Begins reading.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn open(&self) -> Result<Self::Input<'_>, Self::Error>;

    /// Takes the digest of what was read to its end.
    ///
    /// # Errors
    /// Bytes that are not what they should be.
    fn close(&self, input: Self::Input<'_>, sha256: [u8; 32]) -> Result<Self::Output, Self::Error>;
}

/// Streams that a thread reads at a time when it has so many to read.
fn lanes(streams: usize) -> usize {
    match (super::most_together(), streams) {
        (most @ LANES.., WIDE..) => most,
        (2.., 2..) => 2,
        _ => 1,
    }
}

/// What becomes of every stream, in their order, by the threads of the current rayon pool: as many at a time on a thread as
/// the processor gains by, when there are enough for all threads. The longest begin, so that none is left over at the end.
pub fn each<S: Stream>(streams: &[S]) -> Vec<Result<S::Output, S::Error>> {
    let threads = rayon::current_num_threads().min(streams.len());
    let lanes = lanes(streams.len().div_ceil(threads.max(1)));
    let queue = Queue::new(streams);
    let workers = (0..threads).into_par_iter().with_max_len(1);
    in_order(workers.flat_map_iter(|_| work(&queue, lanes)).collect())
}

/// What becomes of every stream, in their order, by this thread: as many at a time as the processor gains by.
pub fn here<S: Stream>(streams: &[S]) -> Vec<Result<S::Output, S::Error>> {
    in_order(work(&Queue::new(streams), lanes(streams.len())))
}

fn in_order<T>(mut done: Vec<(usize, T)>) -> Vec<T> {
    done.sort_unstable_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Streams that nobody has taken yet, the longest first.
struct Queue<'a, S> {
    streams: &'a [S],
    order: Vec<usize>,
    next: AtomicUsize,
}

impl<'a, S: Stream> Queue<'a, S> {
    fn new(streams: &'a [S]) -> Queue<'a, S> {
        let mut order: Vec<usize> = (0..streams.len()).collect();
        order.sort_by_cached_key(|&i| Reverse(streams.get(i).map_or(0, S::bytes)));
        Queue { streams, order, next: AtomicUsize::new(0) }
    }

    fn take(&self) -> Option<(usize, &'a S)> {
        let index = *self.order.get(self.next.fetch_add(1, Ordering::Relaxed))?;
        Some((index, self.streams.get(index)?))
    }
}

/// A stream that is being read.
struct Lane<'a, S: Stream + 'a> {
    index: usize,
    stream: &'a S,
    input: S::Input<'a>,
    hash: Sha256,
}

type Done<S> = (usize, Result<<S as Stream>::Output, <S as Stream>::Error>);

impl<'a, S: Stream> Lane<'a, S> {
    /// The next stream of the queue that opens; those that don't are done.
    fn take(queue: &Queue<'a, S>, done: &mut Vec<Done<S>>) -> Option<Lane<'a, S>> {
        loop {
            let (index, stream) = queue.take()?;
            match stream.open() {
                Ok(input) => return Some(Lane { index, stream, input, hash: Sha256::new() }),
                Err(error) => done.push((index, Err(error))),
            }
        }
    }

    /// Bytes that can be hashed now, none at the end.
    fn available(&mut self) -> io::Result<usize> {
        loop {
            match self.input.fill_buf() {
                Ok(bytes) => return Ok(bytes.len()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn close(self) -> Done<S> {
        (self.index, self.stream.close(self.input, self.hash.finish()))
    }
}

/// Hashes that many of the available bytes of every lane, together.
fn hash<S: Stream>(lanes: &mut [Lane<'_, S>], bytes: usize) -> io::Result<()> {
    let mut messages: Vec<(&mut Sha256, &[u8])> = Vec::with_capacity(lanes.len());
    for lane in lanes.iter_mut() {
        let available = lane.input.fill_buf()?.get(..bytes);
        let available = available.ok_or_else(|| io::Error::other("a buffer became shorter"))?;
        messages.push((&mut lane.hash, available));
    }
    Sha256::update_all(&mut messages);
    lanes.iter_mut().for_each(|lane| lane.input.consume(bytes));
    Ok(())
}

/// Takes streams until none is left.
fn work<S: Stream>(queue: &Queue<'_, S>, most: usize) -> Vec<Done<S>> {
    let mut done = Vec::new();
    let mut lanes: Vec<Lane<'_, S>> = Vec::with_capacity(most);
    let mut more = true;
    loop {
        while more && lanes.len() < most {
            match Lane::take(queue, &mut done) {
                Some(lane) => lanes.push(lane),
                None => more = false,
            }
        }
        // Too few for long vectors: two go on, the others wait.
        let together = if lanes.len() >= WIDE { lanes.len() } else { lanes.len().min(2) };
        let mut bytes = usize::MAX;
        let mut ended = false;
        for i in (0..together).rev() {
            match lanes[i].available() {
                Ok(0) => done.push(lanes.swap_remove(i).close()),
                Ok(some) => {
                    bytes = bytes.min(some);
                    continue;
                }
                Err(error) => done.push((lanes.swap_remove(i).index, Err(error.into()))),
            }
            ended = true;
        }
        if ended {
            continue;
        }
        if lanes.is_empty() {
            return done;
        }
        if let Err(error) = hash(&mut lanes[..together], bytes) {
            // Whichever it was, none of their digests would be right any more.
            let kind = error.kind();
            let torn = lanes.drain(..together);
            done.extend(torn.map(|lane| (lane.index, Err(io::Error::from(kind).into()))));
        }
    }
}

/// The digest of whatever a reader gives.
///
/// # Errors
/// The reader's error.
pub fn read(mut input: impl BufRead) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    loop {
        match input.fill_buf() {
            Ok([]) => return Ok(hash.finish()),
            Ok(bytes) => {
                hash.update(bytes);
                let taken = bytes.len();
                input.consume(taken);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// [`Read::read`] of what is read by its buffer.
///
/// # Errors
/// Those of the buffer.
pub fn take(input: &mut impl BufRead, into: &mut [u8]) -> io::Result<usize> {
    let taken = input.fill_buf()?.read(into)?;
    input.consume(taken);
    Ok(taken)
}

/// How an [`Item`] is opened.
type Open<'a> = dyn Fn() -> io::Result<Box<dyn BufRead + 'a>> + Sync + 'a;

/// A stream of which the digest is wanted and nothing else.
pub struct Item<'a> {
    bytes: u64,
    open: Box<Open<'a>>,
}

impl<'a> Item<'a> {
    /// About so many bytes, which the function begins to read.
    pub fn new<R: BufRead + 'a>(
        bytes: u64,
        open: impl Fn() -> io::Result<R> + Sync + 'a,
    ) -> Item<'a> {
        Item { bytes, open: Box::new(move || Ok(Box::new(open()?))) }
    }
}

impl Stream for Item<'_> {
    type Input<'s>
        = Box<dyn BufRead + 's>
    where
        Self: 's;
    type Output = [u8; 32];
    type Error = io::Error;

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn open(&self) -> io::Result<Box<dyn BufRead + '_>> {
        (self.open)()
    }

    fn close(&self, _: Box<dyn BufRead + '_>, sha256: [u8; 32]) -> io::Result<[u8; 32]> {
        Ok(sha256)
    }
}

/// Slices one after the other, as one stream.
#[derive(Debug, Clone)]
pub struct Parts<'a, I> {
    now: &'a [u8],
    next: I,
}

impl<'a, I: Iterator<Item = &'a [u8]>> Parts<'a, I> {
    /// The slices in order.
    pub fn new(parts: impl IntoIterator<IntoIter = I>) -> Parts<'a, I> {
        Parts { now: &[], next: parts.into_iter() }
    }
}

impl<'a, I: Iterator<Item = &'a [u8]>> BufRead for Parts<'a, I> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.now.is_empty() {
            match self.next.next() {
                Some(part) => self.now = part,
                None => break,
            }
        }
        Ok(self.now)
    }

    fn consume(&mut self, bytes: usize) {
        self.now = self.now.get(bytes..).unwrap_or_default();
    }
}

impl<'a, I: Iterator<Item = &'a [u8]>> Read for Parts<'a, I> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        take(self, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::sha256;

    /// Bytes that come a few at a time, or an error behind them.
    struct Bytes {
        bytes: Vec<u8>,
        step: usize,
        fails: bool,
    }

    struct Steps<'a> {
        left: &'a [u8],
        of: &'a Bytes,
        interrupted: bool,
    }

    impl Read for Steps<'_> {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            unreachable!("streams are read by their buffers")
        }
    }

    impl BufRead for Steps<'_> {
        fn fill_buf(&mut self) -> io::Result<&[u8]> {
            if !std::mem::replace(&mut self.interrupted, true) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            if self.left.is_empty() && self.of.fails {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(&self.left[..self.left.len().min(self.of.step)])
        }

        fn consume(&mut self, bytes: usize) {
            self.left = &self.left[bytes..];
        }
    }

    impl Stream for Bytes {
        type Input<'a> = Steps<'a>;
        type Output = [u8; 32];
        type Error = io::Error;

        fn bytes(&self) -> u64 {
            self.bytes.len() as u64
        }

        fn open(&self) -> io::Result<Steps<'_>> {
            if self.step == 0 {
                return Err(io::ErrorKind::NotFound.into());
            }
            Ok(Steps { left: &self.bytes, of: self, interrupted: false })
        }

        fn close(&self, input: Steps<'_>, sha256: [u8; 32]) -> io::Result<[u8; 32]> {
            assert!(input.left.is_empty());
            Ok(sha256)
        }
    }

    fn streams(n: usize) -> Vec<Bytes> {
        let make = |i: usize| Bytes {
            bytes: (0..i * 977 % 5000).map(|b| (b * 31 + i) as u8).collect(),
            step: 1 + i * 131 % 900,
            fails: false,
        };
        (0..n).map(make).collect()
    }

    #[test]
    fn digests_come_in_the_order_of_the_streams_whatever_the_threads() {
        for n in [0, 1, 2, 3, 7, 11, 16, 40] {
            let streams = streams(n);
            let want: Vec<[u8; 32]> = streams.iter().map(|s| sha256([&s.bytes[..]])).collect();
            let found = |all: Vec<io::Result<[u8; 32]>>| -> Vec<[u8; 32]> {
                all.into_iter().map(|one| one.expect("reads")).collect()
            };
            assert_eq!(found(here(&streams)), want);
            for threads in [1, 2, 3, 64] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
                let all = pool.expect("a pool").install(|| each(&streams));
                assert_eq!(found(all), want, "{n} streams, {threads} threads");
            }
        }
    }

    #[test]
    fn a_stream_that_fails_takes_no_other_with_it() {
        let mut all = streams(9);
        all[3].fails = true;
        all[5].step = 0;
        let found = here(&all);
        for (i, (stream, result)) in all.iter().zip(found).enumerate() {
            match i {
                3 => assert_eq!(result.map_err(|e| e.kind()), Err(io::ErrorKind::UnexpectedEof)),
                5 => assert_eq!(result.map_err(|e| e.kind()), Err(io::ErrorKind::NotFound)),
                _ => assert_eq!(result.expect("reads"), sha256([&stream.bytes[..]])),
            }
        }
    }

    #[test]
    fn parts_are_read_as_one_stream() {
        let parts = [&b"ab"[..], b"", b"", b"cde", b""];
        let mut text = String::new();
        Parts::new(parts).read_to_string(&mut text).expect("reads");
        assert_eq!(text, "abcde");
    }
}
