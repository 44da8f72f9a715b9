package peer

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
)

// seal makes or verifies the tags of one direction of a connection. A tag is the GMAC (NIST SP
// 800-38D) of a part: a header, a payload, or at most sealPart bytes of a block. Its nonce is the
// number of the part in its direction, so no part can be left out, repeated or moved, and the key
// is of this direction of this connection, so none can come from elsewhere.
type seal struct {
	aead  cipher.AEAD
	nonce [12]byte // 4 zero bytes, and the number of the next part, big-endian
	part  uint64
}

const (
	sealKeyBytes = 32
	sealPart     = 256 << 10 // bytes of a block under one tag
)

func newSeal(key []byte) seal {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // of a key of another length
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err) // of a cipher with another block
	}
	return seal{aead: aead}
}

// tag appends the tag of the next part to b.
func (s *seal) tag(b, part []byte) []byte { return s.aead.Seal(b, s.next(), nil, part) }

// verify verifies the tag of the next part.
func (s *seal) verify(part, tag []byte) error {
	if _, err := s.aead.Open(nil, s.next(), tag, part); err != nil {
		return malformed("a MAC that does not match")
	}
	return nil
}

// skip counts parts that are not verified because nothing of them is used.
func (s *seal) skip(parts int) { s.part += uint64(parts) }

// back takes the number of the last part again, whose tag was not made to its end.
func (s *seal) back() { s.part-- }

func (s *seal) next() []byte {
	be.PutUint64(s.nonce[4:], s.part)
	s.part++
	return s.nonce[:]
}

// sealed returns the bytes that n bytes of a block have on the wire.
func sealed(n int64) int64 { return n + int64(parts(n))*macBytes }

func parts(n int64) int { return int((n + sealPart - 1) / sealPart) }

// derive returns the bytes that only a holder of the key can make for this handshake and label: a
// proof, or the key of a seal. The salt is all that was said before the proofs.
func (t *transcript) derive(label string) []byte {
	salt := append(append([]byte(nil), t.hello...), t.challenge[:challengeBytes-proofBytes]...)
	b, err := hkdf.Key(sha256.New, t.key, salt, label, sealKeyBytes)
	if err != nil {
		panic(err) // of a length beyond HKDF's
	}
	return b
}
