//! Just enough MessagePack to read a payload in place: nothing is allocated by what a length *claims*.

/// Deepest nesting that [`Reader::skip`] follows. Events nest four deep (batch, events, event, extra keys, pair).
const MAX_DEPTH: u32 = 32;

/// Why bytes cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadBytes {
    /// The payload ends inside a value.
    #[error("the payload ends inside a value")]
    Truncated,
    /// Another type was expected here.
    #[error("expected {0}")]
    Expected(&'static str),
    /// Values nested deeper than any event.
    #[error("values are nested deeper than {MAX_DEPTH}")]
    TooDeep,
}

/// A place in a payload.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8], BadBytes> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or(BadBytes::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8, BadBytes> {
        Ok(self.take(1)?[0])
    }

    fn peek(&self) -> Result<u8, BadBytes> {
        self.rest.first().copied().ok_or(BadBytes::Truncated)
    }

    /// An unsigned big-endian number of `bytes` (at most 8) bytes.
    fn unsigned(&mut self, bytes: usize) -> Result<u64, BadBytes> {
        Ok(self.take(bytes)?.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
    }

    /// True, and moves on, when the value is nil.
    pub fn nil(&mut self) -> Result<bool, BadBytes> {
        let nil = self.peek()? == 0xc0;
        if nil {
            self.byte()?;
        }
        Ok(nil)
    }

    /// Any integer, as the 64 bits of its two's complement, and whether it is negative.
    pub fn integer(&mut self) -> Result<(u64, bool), BadBytes> {
        let at = *self;
        let tag = self.byte()?;
        let signed = |n: i64| (n as u64, n < 0);
        Ok(match tag {
            0x00..=0x7f => (u64::from(tag), false),
            0xe0..=0xff => signed(i64::from(tag as i8)),
            0xcc..=0xcf => (self.unsigned(1 << (tag - 0xcc))?, false),
            0xd0 => signed(i64::from(self.unsigned(1)? as i8)),
            0xd1 => signed(i64::from(self.unsigned(2)? as i16)),
            0xd2 => signed(i64::from(self.unsigned(4)? as i32)),
            0xd3 => signed(self.unsigned(8)? as i64),
            _ => {
                *self = at;
                return Err(BadBytes::Expected("an integer"));
            }
        })
    }

    /// A number that is not negative and fits 32 bits.
    pub fn u32(&mut self) -> Result<u32, BadBytes> {
        match self.integer()? {
            (n, false) => u32::try_from(n).map_err(|_| BadBytes::Expected("a number of 32 bits")),
            (_, true) => Err(BadBytes::Expected("a number that is not negative")),
        }
    }

    /// A float or an integer, as a float.
    pub fn float(&mut self) -> Result<f64, BadBytes> {
        match self.peek()? {
            0xca => {
                self.byte()?;
                Ok(f64::from(f32::from_bits(self.unsigned(4)? as u32)))
            }
            0xcb => {
                self.byte()?;
                Ok(f64::from_bits(self.unsigned(8)?))
            }
            _ => self.integer().map(|(n, negative)| if negative { n as i64 as f64 } else { n as f64 }),
        }
    }

    fn bytes_of(&mut self, fix: Option<(u8, u8)>, first: u8, what: &'static str) -> Result<&'a [u8], BadBytes> {
        let tag = self.peek()?;
        let length = match (fix, tag) {
            (Some((low, high)), _) if (low..=high).contains(&tag) => {
                self.byte()?;
                u64::from(tag - low)
            }
            _ if (first..=first + 2).contains(&tag) => {
                self.byte()?;
                self.unsigned(1 << (tag - first))?
            }
            _ => return Err(BadBytes::Expected(what)),
        };
        self.take(usize::try_from(length).map_err(|_| BadBytes::Truncated)?)
    }

    /// A text; invalid UTF-8 is refused.
    pub fn text(&mut self) -> Result<&'a str, BadBytes> {
        let bytes = self.bytes_of(Some((0xa0, 0xbf)), 0xd9, "a text")?;
        std::str::from_utf8(bytes).map_err(|_| BadBytes::Expected("UTF-8"))
    }

    /// A `bin` of any length.
    pub fn bin(&mut self) -> Result<&'a [u8], BadBytes> {
        self.bytes_of(None, 0xc4, "bytes")
    }

    fn count(&mut self, fix: u8, first: u8, what: &'static str) -> Result<u32, BadBytes> {
        let tag = self.peek()?;
        if tag & 0xf0 == fix {
            self.byte()?;
            return Ok(u32::from(tag & 0x0f));
        }
        if tag != first && tag != first + 1 {
            return Err(BadBytes::Expected(what));
        }
        self.byte()?;
        Ok(self.unsigned(if tag == first { 2 } else { 4 })? as u32)
    }

    /// The length that an array claims. Whoever reads on finds out whether that is true.
    pub fn array(&mut self) -> Result<u32, BadBytes> {
        self.count(0x90, 0xdc, "an array")
    }

    /// The number of pairs that a map claims.
    pub fn map(&mut self) -> Result<u32, BadBytes> {
        self.count(0x80, 0xde, "a map")
    }

    /// Is the next value an array?
    pub fn at_array(&self) -> bool {
        matches!(self.peek(), Ok(0x90..=0x9f | 0xdc | 0xdd))
    }

    /// Is the next value a map?
    pub fn at_map(&self) -> bool {
        matches!(self.peek(), Ok(0x80..=0x8f | 0xde | 0xdf))
    }

    /// Is the next value a text?
    pub fn at_text(&self) -> bool {
        matches!(self.peek(), Ok(0xa0..=0xbf | 0xd9..=0xdb))
    }

    /// Is the next value `bin`?
    pub fn at_bin(&self) -> bool {
        matches!(self.peek(), Ok(0xc4..=0xc6))
    }

    /// Moves over one value, whatever it is, and gives the bytes that it takes.
    pub fn skip(&mut self) -> Result<&'a [u8], BadBytes> {
        let start = self.rest;
        self.skip_nested(0)?;
        Ok(&start[..start.len() - self.rest.len()])
    }

    fn skip_nested(&mut self, depth: u32) -> Result<(), BadBytes> {
        if depth > MAX_DEPTH {
            return Err(BadBytes::TooDeep);
        }
        if self.at_array() || self.at_map() {
            let values = if self.at_array() { u64::from(self.array()?) } else { 2 * u64::from(self.map()?) };
            // Every value takes a byte, so a claimed length runs out with the payload.
            for _ in 0..values {
                self.skip_nested(depth + 1)?;
            }
            return Ok(());
        }
        if self.at_text() {
            // Invalid UTF-8 can be skipped, though not read.
            return self.bytes_of(Some((0xa0, 0xbf)), 0xd9, "a text").map(|_| ());
        }
        let fixed = match self.peek()? {
            0xc4..=0xc6 => return self.bin().map(|_| ()),
            tag @ 0xc7..=0xc9 => {
                self.byte()?;
                let length = self.unsigned(1 << (tag - 0xc7))? + 1;
                return self.take(usize::try_from(length).map_err(|_| BadBytes::Truncated)?).map(|_| ());
            }
            0xca | 0xce | 0xd2 => 4,
            0xcb | 0xcf | 0xd3 => 8,
            0xcc | 0xd0 => 1,
            0xcd | 0xd1 => 2,
            tag @ 0xd4..=0xd8 => 1 + (1 << (tag - 0xd4)),
            _ => 0,
        };
        self.take(1 + fixed).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(value: impl serde::Serialize) -> Vec<u8> {
        rmp_serde::to_vec(&value).expect("plain values encode")
    }

    #[test]
    fn integers_of_every_width() {
        for n in [0i64, 1, 127, 128, 255, 256, 65535, 65536, 1 << 33, -1, -32, -33, -129, -32769, i64::MIN] {
            assert_eq!(Reader::new(&packed(n)).integer(), Ok((n as u64, n < 0)), "{n}");
        }
        assert_eq!(Reader::new(&packed(u64::MAX)).integer(), Ok((u64::MAX, false)));
        assert!(Reader::new(&packed(1u64 << 32)).u32().is_err());
        assert!(Reader::new(&packed(-1)).u32().is_err());
        assert!(Reader::new(&packed("1")).integer().is_err());
    }

    #[test]
    fn floats_and_integers_are_times() {
        assert_eq!(Reader::new(&packed(1.5f64)).float(), Ok(1.5));
        assert_eq!(Reader::new(&packed(1.5f32)).float(), Ok(1.5));
        assert_eq!(Reader::new(&packed(-3)).float(), Ok(-3.0));
    }

    #[test]
    fn wide_headers_for_small_counts() {
        assert_eq!(Reader::new(&[0xdc, 0, 2, 1, 2]).array(), Ok(2));
        assert_eq!(Reader::new(&[0xdd, 0, 0, 0, 2]).array(), Ok(2));
        assert_eq!(Reader::new(&[0xde, 0, 8]).map(), Ok(8));
        assert_eq!(Reader::new(&[0xdf, 0, 0, 0, 8]).map(), Ok(8));
        assert_eq!(Reader::new(&[0xd9, 1, b'a']).text(), Ok("a"));
        assert_eq!(Reader::new(&[0xc6, 0, 0, 0, 1, 7]).bin(), Ok(&[7u8][..]));
    }

    #[test]
    fn skipping_goes_over_every_type() {
        let mut bytes = packed((1, -1, "text", 1.5f64, 2.5f32, [1u64 << 40; 3], Some(true), None::<u8>));
        bytes.extend([0xc7, 2, 1, 9, 9, 0xd4, 1, 9, 0xd8, 1]);
        bytes.extend([9; 16]);
        bytes.extend([0xc4, 1, 9, 0x81, 0xa1, b'k', 0x90, 0xa1, 0xff]);
        let mut reader = Reader::new(&bytes);
        let mut count = 0;
        while !reader.rest.is_empty() {
            reader.skip().expect("a value");
            count += 1;
        }
        assert_eq!(count, 7);
    }

    #[test]
    fn what_is_cut_or_lies_is_refused() {
        assert_eq!(Reader::new(&[]).skip(), Err(BadBytes::Truncated));
        assert_eq!(Reader::new(&[0xdd, 255, 255, 255, 255, 1]).skip(), Err(BadBytes::Truncated));
        assert_eq!(Reader::new(&[0xc6, 255, 255, 255, 255, 1]).bin(), Err(BadBytes::Truncated));
        assert_eq!(Reader::new(&[0xcf, 1]).integer(), Err(BadBytes::Truncated));
        assert_eq!(Reader::new(&[0x91; 1000]).skip(), Err(BadBytes::TooDeep));
        assert_eq!(Reader::new(&[0xa1, 0xff]).text(), Err(BadBytes::Expected("UTF-8")));
    }
}
