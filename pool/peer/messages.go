package peer

import (
	"encoding/binary"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// version is the version of the protocol that this package speaks.
const version = 3

// Sizes of payloads, or of their fixed parts, bytes.
const (
	nonceBytes     = 32
	proofBytes     = 32
	helloBytes     = 8 + nonceBytes
	challengeBytes = 8 + nonceBytes + proofBytes
	maxErrorText   = 256
	subscribeBytes = 24
	groupBytes     = 8
	runBytes       = 8
	maxRuns        = 512 // of one HAVE
	endBytes       = 8
	getBytes       = 24
	tableBytes     = 4
	rowBytes       = 8
	placesBytes    = 8
	placeBytes     = 16
)

var le = binary.LittleEndian

// hello is what the client sends first:
//
//	0  2  lowest version that it speaks
//	2  2  highest
//	4  4  its timeout, ms: how long the other side may be silent
//	8  32 nonce
type hello struct {
	low, high uint16
	timeout   time.Duration
	nonce     [nonceBytes]byte
}

func (m *hello) encode() []byte {
	b := le.AppendUint16(nil, m.low)
	b = le.AppendUint16(b, m.high)
	b = le.AppendUint32(b, uint32(m.timeout.Milliseconds()))
	return append(b, m.nonce[:]...)
}

func parseHello(b []byte) (m hello, err error) {
	if len(b) != helloBytes {
		return m, malformed("HELLO of %d bytes, must be %d", len(b), helloBytes)
	}
	m.low, m.high = le.Uint16(b), le.Uint16(b[2:])
	copy(m.nonce[:], b[8:])
	m.timeout, err = parseTimeout(b[4:])
	return m, err
}

func parseTimeout(b []byte) (time.Duration, error) {
	d := time.Duration(le.Uint32(b)) * time.Millisecond
	if d < MinTimeout || d > MaxTimeout {
		return 0, malformed("a timeout of %v, allowed: %v to %v", d, MinTimeout, MaxTimeout)
	}
	return d, nil
}

// challenge is the server's answer:
//
//	0  2  version of the connection
//	2  2  zero
//	4  4  its timeout, ms
//	8  32 nonce
//	40 32 proof that it has the key
type challenge struct {
	version uint16
	timeout time.Duration
	nonce   [nonceBytes]byte
	proof   [proofBytes]byte
}

func (m *challenge) encode() []byte {
	b := le.AppendUint16(nil, m.version)
	b = le.AppendUint16(b, 0)
	b = le.AppendUint32(b, uint32(m.timeout.Milliseconds()))
	b = append(b, m.nonce[:]...)
	return append(b, m.proof[:]...)
}

func parseChallenge(b []byte) (m challenge, err error) {
	if len(b) != challengeBytes || b[2] != 0 || b[3] != 0 {
		return m, malformed("CHALLENGE of %d bytes, must be %d", len(b), challengeBytes)
	}
	m.version = le.Uint16(b)
	copy(m.nonce[:], b[8:])
	copy(m.proof[:], b[8+nonceBytes:])
	m.timeout, err = parseTimeout(b[4:])
	return m, err
}

// get asks for a shard of some blocks:
//
//	0  16 fingerprint of the space
//	16 4  bytes of that shard of a block
//	20 1  group
//	21 1  shard
//	22 1  bytes of a hash
//	23 1  zero
//	24    1 to 64 hashes. All together at most 8 MiB, unless it is one
type get struct {
	space  pool.Fingerprint
	length uint32
	group  uint8
	shard  uint8
	hashes pool.Hashes
}

func (m *get) encode(b []byte) []byte {
	b = append(b, m.space[:]...)
	b = le.AppendUint32(b, m.length)
	b = append(b, m.group, m.shard, byte(m.hashes.Len), 0)
	for i := range m.hashes.N {
		b = append(b, m.hashes.At(i)...)
	}
	return b
}

// parseGet decodes a GET. The hashes are a view of b.
func parseGet(b []byte) (m get, err error) {
	if len(b) < getBytes {
		return m, malformed("GET of %d bytes, more than %d", len(b), getBytes)
	}
	copy(m.space[:], b)
	m.length, m.group, m.shard = le.Uint32(b[16:]), b[20], b[21]
	size, rest := int(b[22]), b[getBytes:]
	if size < 1 || size > pool.MaxHashLen || b[23] != 0 || len(rest) == 0 || len(rest)%size != 0 ||
		len(rest)/size > MaxBatch || m.length < 1 || m.length > MaxBlockBytes {
		return m, malformed("GET %x, %d bytes of hashes", b[:getBytes], len(rest))
	}
	if m.hashes = pool.Chain(rest, size); m.hashes.N > 1 && int64(m.hashes.N)*int64(m.length) > MaxBatchBytes {
		return m, malformed("GET of %d blocks of %d bytes, allowed: %d bytes", m.hashes.N, m.length, MaxBatchBytes)
	}
	return m, nil
}

// row is the answer for one block of a GET.
type row struct {
	status pool.Status // OK, Missing, Invalid or Corrupt
	sum    uint32      // of the bytes, begun with Key.Seed; 0 unless the status is OK
}

// A table begins a BLOCKS: rows (2), zero (2), and for each block of the GET status (1), zero (3),
// sum (4). The bytes of the blocks that are OK follow it, in order, each seal.Part of a block and
// its rest with a tag.
func encodeTable(b []byte, rows []row) []byte {
	b = le.AppendUint16(b, uint16(len(rows)))
	b = append(b, 0, 0)
	for _, r := range rows {
		b = append(b, byte(r.status), 0, 0, 0)
		b = le.AppendUint32(b, r.sum)
	}
	return b
}

func parseTable(b []byte, rows []row) ([]row, error) {
	if len(b) < tableBytes || b[2]|b[3] != 0 || len(b) != tableBytes+int(le.Uint16(b))*rowBytes {
		return nil, malformed("BLOCKS: a table of %d bytes", len(b))
	}
	for b = b[tableBytes:]; len(b) > 0; b = b[rowBytes:] {
		r := row{pool.Status(b[0]), le.Uint32(b[4:])}
		if err := r.check("BLOCKS", b); err != nil {
			return nil, err
		}
		rows = append(rows, r)
	}
	return rows, nil
}

// check checks a row of a message that begins at b.
func (r *row) check(message string, b []byte) error {
	switch r.status {
	case pool.OK, pool.Missing, pool.Invalid, pool.Corrupt:
	default:
		return malformed("%s: status %d", message, r.status)
	}
	if b[1]|b[2]|b[3] != 0 || r.status != pool.OK && r.sum != 0 {
		return malformed("%s: row %x", message, b[:rowBytes])
	}
	return nil
}

// delivered says that the peer has a transfer, or does not want it any more: the space's
// fingerprint (16) and the name (1 to 256).
type delivered struct {
	space pool.Fingerprint
	name  string
}

func (m *delivered) encode() []byte { return append(m.space[:], m.name...) }

func parseDelivered(b []byte) (m delivered, err error) {
	if len(b) <= len(m.space) || len(b) > len(m.space)+MaxName {
		return m, malformed("DELIVERED of %d bytes", len(b))
	}
	copy(m.space[:], b)
	m.name = string(b[len(m.space):])
	return m, nil
}
