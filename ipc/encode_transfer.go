package ipc

import "math"

// The walks over the fields of messages about transfers between engines.

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
