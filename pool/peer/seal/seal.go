// Package seal authenticates what goes over a connection, with a key for each direction.
package seal

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"errors"
)

// Seal makes or verifies the tags of one direction of a connection. A tag is the GMAC (NIST SP
// 800-38D) of a part: a header, a payload, or at most Part bytes of a block. Its nonce is the
// number of the part in its direction, so no part can be left out, repeated or moved, and the key
// is of this direction of this connection, so none can come from elsewhere.
type Seal struct {
	aead  cipher.AEAD
	nonce [12]byte // 4 zero bytes, and the number of the next part, big-endian
	part  uint64
}

// Sizes, bytes.
const (
	KeyBytes = 32
	TagBytes = 16
	Part     = 512 << 10 // of a block under one tag
)

// ErrForged is a part that the other side has not sent, or not at this place.
var ErrForged = errors.New("a MAC that does not match")

// New returns the seal of a key of KeyBytes.
func New(key []byte) Seal {
	block, err := aes.NewCipher(key)
	if err != nil {
		panic(err) // of a key of another length
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err) // of a cipher with another block
	}
	return Seal{aead: aead}
}

// Tag appends the tag of the next part to b.
func (s *Seal) Tag(b, part []byte) []byte { return s.aead.Seal(b, s.next(), nil, part) }

// Verify verifies the tag of the next part.
func (s *Seal) Verify(part, tag []byte) error {
	if _, err := s.aead.Open(nil, s.next(), tag, part); err != nil {
		return ErrForged
	}
	return nil
}

// Skip counts parts that are not verified because nothing of them is used.
func (s *Seal) Skip(parts int) { s.part += uint64(parts) }

// Back takes the number of the last part again, whose tag was not made to its end.
func (s *Seal) Back() { s.part-- }

func (s *Seal) next() []byte {
	binary.BigEndian.PutUint64(s.nonce[4:], s.part)
	s.part++
	return s.nonce[:]
}

// Sealed returns the bytes that n bytes of a block have on the wire.
func Sealed(n int64) int64 { return n + int64(Parts(n))*TagBytes }

// Parts returns how many parts n bytes of a block are.
func Parts(n int64) int { return int((n + Part - 1) / Part) }
