package peer

import (
	"time"

	"github.com/kvagent/kvagent/pool"
)

// subscribe asks for the blocks of a transfer:
//
//	0  4  how long to wait for it, ms
//	4  1  1: wait for an unknown one too
//	5  1  groups, 1 to 16
//	6  2  bytes of the name, at most 256
//	8  16 fingerprint of the space
//	24    name; for each group, with ascending numbers: number (1), bytes of a hash (1), zero (2),
//	      count (4), hashes. At most 65,536 hashes in all
type subscribe struct {
	wait   time.Duration
	early  bool
	space  pool.Fingerprint
	name   string
	groups []subscribeGroup
}

type subscribeGroup struct {
	group  uint8
	hashes pool.Hashes
}

func (m *subscribe) blocks() (n int) {
	for i := range m.groups {
		n += m.groups[i].hashes.N
	}
	return n
}

func (m *subscribe) encode() []byte {
	b := le.AppendUint32(nil, uint32(m.wait.Milliseconds()))
	early := byte(0)
	if m.early {
		early = 1
	}
	b = append(b, early, byte(len(m.groups)))
	b = le.AppendUint16(b, uint16(len(m.name)))
	b = append(b, m.space[:]...)
	b = append(b, m.name...)
	for i := range m.groups {
		g := &m.groups[i]
		b = append(b, g.group, byte(g.hashes.Len), 0, 0)
		b = le.AppendUint32(b, uint32(g.hashes.N))
		for k := range g.hashes.N {
			b = append(b, g.hashes.At(k)...)
		}
	}
	return b
}

// parseSubscribe decodes a SUBSCRIBE. The hashes are views of b.
func parseSubscribe(b []byte) (m subscribe, err error) {
	if len(b) < subscribeBytes {
		return m, malformed("SUBSCRIBE of %d bytes, at least %d", len(b), subscribeBytes)
	}
	m.wait, m.early = time.Duration(le.Uint32(b))*time.Millisecond, b[4] == 1
	groups, name := int(b[5]), int(le.Uint16(b[6:]))
	copy(m.space[:], b[8:])
	if m.wait > MaxWait || b[4] > 1 || groups < 1 || groups > pool.MaxGroups || name > MaxName ||
		len(b) < subscribeBytes+name {
		return m, malformed("SUBSCRIBE %x", b[:subscribeBytes])
	}
	m.name, b = string(b[subscribeBytes:subscribeBytes+name]), b[subscribeBytes+name:]
	blocks, last := 0, -1
	for range groups {
		if len(b) < groupBytes {
			return m, malformed("SUBSCRIBE: a group is cut off")
		}
		group, size, count := b[0], int(b[1]), int(le.Uint32(b[4:]))
		if int(group) <= last || size < 1 || size > pool.MaxHashLen || b[2] != 0 || b[3] != 0 || count < 1 ||
			count > MaxHashes-blocks || len(b)-groupBytes < count*size {
			return m, malformed("SUBSCRIBE: group %x", b[:groupBytes])
		}
		blob := b[groupBytes : groupBytes+count*size]
		m.groups = append(m.groups, subscribeGroup{group, pool.Chain(blob, size)})
		b, blocks, last = b[groupBytes+count*size:], blocks+count, int(group)
	}
	if len(b) > 0 {
		return m, malformed("SUBSCRIBE: %d bytes after the last group", len(b))
	}
	return m, nil
}

// run is blocks next to each other in a subscription, whose groups are counted through.
type run struct{ first, count uint32 }

// A HAVE is 1 to maxRuns of: first (4), count (4, at least 1).
func encodeHave(runs []run) (b []byte) {
	for _, r := range runs {
		b = le.AppendUint32(b, r.first)
		b = le.AppendUint32(b, r.count)
	}
	return b
}

func parseHave(b []byte) (runs []run, err error) {
	if len(b) == 0 || len(b)%runBytes != 0 {
		return nil, malformed("HAVE of %d bytes", len(b))
	}
	for ; len(b) > 0; b = b[runBytes:] {
		r := run{le.Uint32(b), le.Uint32(b[4:])}
		if r.count < 1 || r.count > MaxHashes || r.first > MaxHashes-r.count {
			return nil, malformed("HAVE: %d blocks from %d on", r.count, r.first)
		}
		runs = append(runs, r)
	}
	return runs, nil
}

// An END is: End (1), zero (3), tokens of the transfer (4).
func encodeEnd(e End, tokens uint32) []byte {
	return le.AppendUint32([]byte{byte(e), 0, 0, 0}, tokens)
}

func parseEnd(b []byte) (e End, tokens uint32, err error) {
	if len(b) != endBytes || b[0] < byte(EndComplete) || b[0] > byte(EndRefused) || b[1]|b[2]|b[3] != 0 {
		return 0, 0, malformed("END %x", b)
	}
	return End(b[0]), le.Uint32(b[4:]), nil
}
