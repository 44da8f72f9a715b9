package pool

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
)

// MaxKeyText is the length of the longest Text of a key, bytes.
const MaxKeyText = 2*len(Fingerprint{}) +
	len("@pcp0@dcp0@head_or_tp_rank:255@pp_rank:0@group:255@cache_role:kv@cache_family:default@") + 2*MaxHashLen

// Text returns the name of a block's shard in stores that many nodes share: AscendStore's PoolKey,
// with the space's fingerprint in lower-case hex in place of the model's name, and the shard as
// head_or_tp_rank:
//
//	{fingerprint}@pcp0@dcp0@head_or_tp_rank:{shard}@pp_rank:0@group:{group}
//	    @cache_role:kv@cache_family:default@{hash}      (in one line)
//
// The fields that kvagent's fingerprint already covers (pcp, dcp, pp_rank, cache_role,
// cache_family) are constant. Different keys have different texts.
func (k *Key) Text() string { return string(k.AppendText(make([]byte, 0, MaxKeyText))) }

// AppendText appends Text to b.
func (k *Key) AppendText(b []byte) []byte {
	b = hex.AppendEncode(b, k.Space[:])
	b = append(b, "@pcp0@dcp0@head_or_tp_rank:"...)
	b = strconv.AppendUint(b, uint64(k.Shard), 10)
	b = append(b, "@pp_rank:0@group:"...)
	b = strconv.AppendUint(b, uint64(k.Group), 10)
	b = append(b, "@cache_role:kv@cache_family:default@"...)
	return hex.AppendEncode(b, k.Hash.Bytes[:k.Hash.Len])
}

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
