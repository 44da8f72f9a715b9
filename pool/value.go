package pool

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// ValueHeader is the size of the header that a shared store keeps before a shard's bytes, by which
// a reader verifies that it has the whole of that shard and nothing else. Little-endian:
//
//	0   8  "kvagent", and 1: the version of this form
//	8   4  length of the data
//	12  4  CRC-32C of the data, begun with Key.Seed: bound to the key and the length
//	16  16 the first bytes of the SHA-256 of the key's Text
const ValueHeader = 32

const valueMagic = "kvagent\x01"

// AppendValueHeader appends the header of data stored under k.
func AppendValueHeader(b []byte, k *Key, data []byte) []byte {
	b = append(b, valueMagic...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(data)))
	b = binary.LittleEndian.AppendUint32(b, Sum(k.Seed(uint32(len(data))), data))
	digest := k.textDigest()
	return append(b, digest[:16]...)
}

// CheckValueHeader reports why header, of ValueHeader bytes, is not that of k and this length.
func CheckValueHeader(header []byte, k *Key, length int) error {
	digest := k.textDigest()
	switch {
	case len(header) != ValueHeader:
		return fmt.Errorf("value header: %d bytes, must be %d", len(header), ValueHeader)
	case string(header[:8]) != valueMagic:
		return fmt.Errorf("value header: begins with %x, not with %x", header[:8], valueMagic)
	case string(header[16:]) != string(digest[:16]):
		return fmt.Errorf("value header: of another key")
	case int64(binary.LittleEndian.Uint32(header[8:])) != int64(length):
		return fmt.Errorf("value header: of %d bytes, not %d", binary.LittleEndian.Uint32(header[8:]), length)
	}
	return nil
}

// CheckValue reports why header and data are not what was stored under k.
func CheckValue(header []byte, k *Key, data []byte) error {
	if err := CheckValueHeader(header, k, len(data)); err != nil {
		return err
	}
	if got, want := Sum(k.Seed(uint32(len(data))), data), binary.LittleEndian.Uint32(header[12:]); got != want {
		return fmt.Errorf("value: checksum %08x, the header says %08x", got, want)
	}
	return nil
}

func (k *Key) textDigest() [sha256.Size]byte {
	var b [MaxKeyText]byte
	return sha256.Sum256(k.AppendText(b[:0]))
}
