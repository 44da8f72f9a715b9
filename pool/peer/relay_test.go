package peer

import (
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// relayed is a frame that a relay passes on: the header, and what follows it.
type relayed struct {
	kind
	toServer bool
	bytes    []byte
}

// relay passes everything between an agent that dials it and a real one, without the key. After the
// handshake, pass returns what the receiver of a frame gets instead of it, and may send something
// to its sender.
func relay(t *testing.T, to string, pass func(f relayed, back io.Writer) [][]byte) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	var all sync.WaitGroup
	one := func(from, to net.Conn, toServer bool) {
		defer from.Close()
		defer to.Close()
		for {
			var head [headerBytes]byte
			if _, err := io.ReadFull(from, head[:]); err != nil {
				return
			}
			h, err := parseHeader(head[:])
			if err != nil {
				return
			}
			b := make([]byte, headerBytes+h.length)
			copy(b, head[:])
			if _, err := io.ReadFull(from, b[headerBytes:]); err != nil {
				return
			}
			out := [][]byte{b}
			if h.kind > kindWelcome {
				out = pass(relayed{h.kind, toServer, b}, from)
			}
			for _, b := range out {
				if _, err := to.Write(b); err != nil {
					return
				}
			}
		}
	}
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			s, err := net.Dial("tcp", to)
			if err != nil {
				c.Close()
				return
			}
			all.Go(func() { one(c, s, true) })
			all.Go(func() { one(s, c, false) })
		}
	})
	t.Cleanup(func() { l.Close(); all.Wait() })
	return l.Addr().String()
}

// zeroCRC is a difference of five bytes that no CRC-32C sees, wherever it is: the polynomial
// itself, the lowest bit first.
func zeroCRC() (d [5]byte) {
	bits := uint64(1)<<32 | 0x1EDC6F41
	for i := range 33 {
		if bits>>(32-i)&1 != 0 {
			d[i/8] |= 1 << (i % 8)
		}
	}
	return d
}

// TestRelay: a host without the key that passes the handshake on to an agent cannot alter anything
// after it: the connection ends, and no wrong byte is stored.
func TestRelay(t *testing.T) {
	spec := specOf(1, 4096)
	spec.Groups = spec.Groups[:1]
	const table, sealed = headerBytes + tableBytes + 2*rowBytes + macBytes, 4096 + macBytes
	only := func(k kind, change func(b []byte) [][]byte) func(f relayed, _ io.Writer) [][]byte {
		return func(f relayed, _ io.Writer) [][]byte {
			if f.kind == k {
				return change(slices.Clone(f.bytes))
			}
			return [][]byte{f.bytes}
		}
	}
	flip := func(at int) func(b []byte) [][]byte {
		return func(b []byte) [][]byte { b[at] ^= 1; return [][]byte{b} }
	}
	for name, pass := range map[string]func(f relayed, back io.Writer) [][]byte{
		"the bytes of a block, so that its CRC matches": only(kindBlocks, func(b []byte) [][]byte {
			for i, d := range zeroCRC() {
				b[len(b)-macBytes-100+i] ^= d
			}
			return [][]byte{b}
		}),
		"a tag of a block": only(kindBlocks, func(b []byte) [][]byte { return flip(len(b) - 1)(b) }),
		"two blocks exchanged, with their sums and tags": only(kindBlocks, func(b []byte) [][]byte {
			if len(b) < table+2*sealed {
				return [][]byte{b}
			}
			row := headerBytes + tableBytes
			return [][]byte{slices.Concat(b[:row], b[row+rowBytes:row+2*rowBytes], b[row:row+rowBytes],
				b[row+2*rowBytes:table], b[table+sealed:table+2*sealed], b[table:table+sealed], b[table+2*sealed:])}
		}),
		"a frame left out":         only(kindHave, func([]byte) [][]byte { return nil }),
		"a frame repeated":         only(kindHave, func(b []byte) [][]byte { return [][]byte{b, b} }),
		"an END":                   only(kindEnd, flip(headerBytes)),
		"the length of a header":   only(kindEnd, flip(12)),
		"the id of a header":       only(kindEnd, flip(8)),
		"a GET of other hashes":    only(kindGet, flip(headerBytes+getBytes)),
		"a SUBSCRIBE without wait": only(kindSubscribe, flip(headerBytes)),
		"a client's frame sent back": func(f relayed, back io.Writer) [][]byte {
			if f.kind == kindSubscribe {
				_, _ = back.Write(f.bytes)
			}
			return [][]byte{f.bytes}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
			h := chain("a system prompt that others use", 3)
			p.saveGroup(0, h, 1)
			s := serve(t, p.config())
			cfg := d.clientConfig()
			cfg.Streams = 1
			client := newClient(t, cfg)
			r := d.request("", h)
			r.Groups = r.Groups[:1]
			got, err := fetchAll(t, client, relay(t, s.Addr().String(), pass), r)
			if !errors.Is(err, ErrLost) {
				t.Errorf("%+v, %v, want %v", got, err, ErrLost)
			}
			if n := d.stored(h); n != got.Blocks {
				t.Errorf("%d blocks are there, %d were stored", n, got.Blocks)
			}
		})
	}
	t.Run("nothing", func(t *testing.T) {
		p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
		h := chain("a", 6)
		p.saveGroup(0, h, 1)
		s := serve(t, p.config())
		r := d.request("", h)
		r.Groups = r.Groups[:1]
		addr := relay(t, s.Addr().String(), func(f relayed, _ io.Writer) [][]byte { return [][]byte{f.bytes} })
		if got, err := fetchAll(t, newClient(t, d.clientConfig()), addr, r); err != nil || d.stored(h) != 6 {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// stored compares every byte of what is stored of a chain in the first group, and returns how many
// blocks there are.
func (a *agent) stored(h pool.Hashes) (n int) {
	present := make([]bool, h.N)
	a.Exists(a.space, 0, h, present)
	for i, is := range present {
		if is && a.whole(0, h.Slice(i, i+1)) {
			n++
		}
	}
	return n
}
