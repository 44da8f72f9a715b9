package ipc

import "math"

// The walks over the fields of messages about transfers between engines, and about what is kept.

func (m *Offer) walk(w *wire) {
	w.begin(TypeOffer, 4)
	w.bin("name", &m.Name, 1, MaxTransferName)
	num(w, "tokens", &m.Tokens, 0, math.MaxUint32)
	num(w, "ttl_ms", &m.TTLMS, 1, MaxTransferMS)
}

func (m *Offered) walk(w *wire) {
	w.begin(TypeOffered, 3)
	w.bin("name", &m.Name, 1, MaxTransferName)
	num(w, "tokens", &m.Tokens, 0, math.MaxUint32)
}

func (m *Delivered) walk(w *wire) {
	w.begin(TypeDelivered, 2)
	w.bin("name", &m.Name, 1, MaxTransferName)
}

func (m *Keep) walk(w *wire) {
	w.begin(TypeKeep, 6)
	num(w, "group", &m.Group, 0, MaxGroups-1)
	num(w, "hash_len", &m.HashLen, 1, MaxHashLen)
	w.bin("hashes", &m.Hashes, 1, MaxJobBlocks*MaxHashLen)
	num(w, "pin_ms", &m.PinMS, 0, MaxKeepMS)
	num(w, "ttl_ms", &m.TTLMS, 0, MaxKeepMS)
	if w.err != nil {
		return
	}
	if n := int(m.HashLen); len(m.Hashes)%n != 0 || len(m.Hashes)/n > MaxJobBlocks {
		w.fail(ReasonLengths, "hashes", "%d bytes, allowed is a multiple of hash_len %d, for 1 to %d hashes",
			len(m.Hashes), n, MaxJobBlocks)
	}
	if m.PinMS == 0 && m.TTLMS == 0 {
		w.fail(ReasonRange, "ttl_ms", "0, allowed with pin_ms 0 is 1 to %d", MaxKeepMS)
	}
}
