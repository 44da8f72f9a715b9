package dram

import "hash/crc32"

// Format 1 is format 2 without an order: bytes 48 to 59 of a header are zero, so no entry says what it hangs on and when it
// was used, and the checksum covers bytes 0 to 47 alone. A file in it is read, and becomes one in format 2 while its headers
// are: each in one store, and the number of the format last. Killed in the middle, what was converted is read as it is.

// decoder says whether a header holds a whole shard, and makes it one of the present format.
type decoder func(h *header, slot uint32) bool

var decoders = map[uint32]decoder{
	fileFormat: (*header).whole,
	oldFormat:  convertFirst,
}

func convertFirst(h *header, slot uint32) bool {
	if h.whole(slot) {
		return true
	}
	if h.check.Load() != firstSum(h) {
		return false
	}
	h.parent.Store(0)
	h.used.Store(0)
	h.check.Store(h.sumOf(slot))
	return true
}

// firstSum is what check was in format 1.
func firstSum(h *header) uint32 { return max(crc32.Checksum(h.fixed(), castagnoli), 1) }

// converted notes that the file is in the present format now.
func (f *file) converted() {
	f.super.format = fileFormat
	fixed := f.super.encode()
	// Format and checksum are one word: the file is in one format or in the other.
	word(f.whole, 8).Store(le.Uint64(fixed[8:]))
}
