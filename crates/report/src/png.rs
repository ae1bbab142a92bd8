//! Small pictures as PNG files, with numbers in them.

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;

/// A picture of 8-bit red, green and blue.
pub(crate) struct Picture {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

/// Height of a glyph in its own pixels.
pub(crate) const GLYPH_HEIGHT: usize = 5;
const GLYPH_WIDTH: usize = 3;

/// Digits and the point, five rows of three pixels each.
const GLYPHS: [(char, [u8; GLYPH_HEIGHT]); 11] = [
    ('0', [0b111, 0b101, 0b101, 0b101, 0b111]),
    ('1', [0b010, 0b110, 0b010, 0b010, 0b111]),
    ('2', [0b111, 0b001, 0b111, 0b100, 0b111]),
    ('3', [0b111, 0b001, 0b111, 0b001, 0b111]),
    ('4', [0b101, 0b101, 0b111, 0b001, 0b001]),
    ('5', [0b111, 0b100, 0b111, 0b001, 0b111]),
    ('6', [0b111, 0b100, 0b111, 0b101, 0b111]),
    ('7', [0b111, 0b001, 0b010, 0b010, 0b010]),
    ('8', [0b111, 0b101, 0b111, 0b101, 0b111]),
    ('9', [0b111, 0b101, 0b111, 0b001, 0b111]),
    ('.', [0b000, 0b000, 0b000, 0b000, 0b010]),
];

/// Width of a number whose glyphs' pixels are `scale` wide.
pub(crate) fn text_width(text: &str, scale: usize) -> usize {
    (text.chars().count() * (GLYPH_WIDTH + 1)).saturating_sub(1) * scale
}

impl Picture {
    pub(crate) fn new(width: usize, height: usize, paper: [u8; 3]) -> Picture {
        Picture { width, height, pixels: paper.repeat(width * height) }
    }

    /// Fills a rectangle; what lies outside of the picture is left out.
    pub(crate) fn fill(&mut self, at: (usize, usize), size: (usize, usize), color: [u8; 3]) {
        for y in at.1..(at.1 + size.1).min(self.height) {
            for x in at.0..(at.0 + size.0).min(self.width) {
                self.pixels[(y * self.width + x) * 3..][..3].copy_from_slice(&color);
            }
        }
    }

    /// Writes a number; other letters leave a gap.
    pub(crate) fn text(&mut self, at: (usize, usize), text: &str, scale: usize, color: [u8; 3]) {
        for (place, letter) in text.chars().enumerate() {
            let Some((_, rows)) = GLYPHS.iter().find(|(known, _)| *known == letter) else { continue };
            for (row, bits) in rows.iter().enumerate() {
                for column in (0..GLYPH_WIDTH).filter(|column| bits >> (GLYPH_WIDTH - 1 - column) & 1 == 1) {
                    let x = at.0 + (place * (GLYPH_WIDTH + 1) + column) * scale;
                    self.fill((x, at.1 + row * scale), (scale, scale), color);
                }
            }
        }
    }
}

/// The bytes of the file.
pub(crate) fn encode(picture: &Picture) -> Vec<u8> {
    let mut scanlines = Vec::with_capacity(picture.height * (1 + picture.width * 3));
    for line in picture.pixels.chunks(picture.width.max(1) * 3) {
        scanlines.push(0); // no filter
        scanlines.extend_from_slice(line);
    }
    let mut packed = ZlibEncoder::new(Vec::new(), Compression::best());
    // Writing to memory cannot fail.
    let _ = packed.write_all(&scanlines);
    let packed = packed.finish().unwrap_or_default();
    let mut header = [picture.width as u32, picture.height as u32].map(u32::to_be_bytes).concat();
    header.extend([8, 2, 0, 0, 0]); // bits, colors, compression, filter, interlace
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    for (kind, data) in [(b"IHDR", header.as_slice()), (b"IDAT", &packed), (b"IEND", &[])] {
        file.extend((data.len() as u32).to_be_bytes());
        let checked = file.len();
        file.extend(kind);
        file.extend(data);
        let mut crc = flate2::Crc::new();
        crc.update(&file[checked..]);
        file.extend(crc.sum().to_be_bytes());
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_parts_in_order() {
        let mut picture = Picture::new(9, 4, [255; 3]);
        picture.text((0, 0), "42", 1, [0; 3]);
        picture.fill((8, 3), (5, 5), [1, 2, 3]); // partly outside
        let file = encode(&picture);
        assert_eq!(&file[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(&file[12..24], b"IHDR\0\0\0\x09\0\0\0\x04");
        assert_eq!(&file[file.len() - 12..], b"\0\0\0\0IEND\xae\x42\x60\x82");
        assert_eq!(text_width("42", 1), 7);
    }
}
