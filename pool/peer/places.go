package peer

import (
	"math"

	"github.com/kvagent/kvagent/pool"
)

// Reader reads memory of other agents into the arena by one-sided reads, and lets theirs read it.
// All its methods may run concurrently.
type Reader interface {
	// Exposed returns how other agents read the arena now, or why they cannot. Without an error
	// Read works, too.
	Exposed() (pool.Exposed, error)
	// Read reads pieces of the memory that a target names, at most MaxBatch. Their addresses are
	// below 2^63. At most maxPulling run at once. When it returns, nothing writes to these pieces
	// of the arena for it any more; after an error they may hold anything. It must return within a
	// bounded time.
	Read(target string, pulls []pool.Pull) error
}

// placed is what became of a PIN.
type placed uint8

// The outcomes.
const (
	placedOK     placed = 0 // the blocks are pinned until UNPIN, and these are their places
	placedNone   placed = 1 // the server's memory cannot be read now
	placedFull   placed = 2 // too much is pinned
	placedStates        = 3
)

// protocols are the names of Exposed.Protocol by their number in PLACES.
var protocols = [...]string{1: "tcp", 2: "rdma"}

// places answers a PIN:
//
//	0  1  outcome: 0 places follow, 1 the memory cannot be read, 2 too much is pinned
//	1  1  1: tcp, 2: rdma; 0 without places
//	2  2  bytes of the target, 1 to 256; 0 without places
//	4  4  zero
//	8     target; for each block of the PIN: status (1), zero (3), sum (4), address (8), which is
//	      below 2^63
type places struct {
	outcome  placed
	protocol string
	target   string
	rows     []placeRow
}

type placeRow struct {
	row
	address uint64 // 0 unless the status is OK
}

func (m *places) encode() []byte {
	if m.outcome != placedOK {
		return []byte{byte(m.outcome), 0, 0, 0, 0, 0, 0, 0}
	}
	number := byte(1)
	if m.protocol == protocols[2] {
		number = 2
	}
	b := le.AppendUint16([]byte{0, number}, uint16(len(m.target)))
	b = append(b, 0, 0, 0, 0)
	b = append(b, m.target...)
	for _, r := range m.rows {
		b = append(b, byte(r.status), 0, 0, 0)
		b = le.AppendUint32(b, r.sum)
		b = le.AppendUint64(b, r.address)
	}
	return b
}

func parsePlaces(b []byte) (m places, err error) {
	if len(b) < placesBytes || le.Uint32(b[4:]) != 0 || b[0] >= placedStates {
		return m, malformed("PLACES of %d bytes", len(b))
	}
	m.outcome = placed(b[0])
	number, target, rest := int(b[1]), int(le.Uint16(b[2:])), b[placesBytes:]
	if m.outcome != placedOK {
		if number != 0 || target != 0 || len(rest) > 0 {
			return m, malformed("PLACES %x without places", b[:placesBytes])
		}
		return m, nil
	}
	if number < 1 || number >= len(protocols) || target < 1 || target > pool.MaxTarget || len(rest) <= target ||
		(len(rest)-target)%placeBytes != 0 || (len(rest)-target)/placeBytes > MaxBatch {
		return m, malformed("PLACES %x with %d bytes", b[:placesBytes], len(rest))
	}
	m.protocol, m.target = protocols[number], string(rest[:target])
	for rest = rest[target:]; len(rest) > 0; rest = rest[placeBytes:] {
		r := placeRow{row{pool.Status(rest[0]), le.Uint32(rest[4:])}, le.Uint64(rest[8:])}
		if err = r.check("PLACES", rest); err != nil {
			return m, err
		}
		if r.address > math.MaxInt64 || r.status != pool.OK && r.address != 0 {
			return m, malformed("PLACES: row %x", rest[:placeBytes])
		}
		m.rows = append(m.rows, r)
	}
	return m, nil
}
