package peer

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// tear truncates the file under an arena: what lies after off cannot be read or written any more.
func tear(t *testing.T, a *agent, off int64) {
	t.Helper()
	_, fd := a.Arena()
	var st unix.Stat_t
	check(t, unix.Fstat(fd, &st))
	check(t, unix.Ftruncate(fd, off&^4095))
	t.Cleanup(func() { check(t, unix.Ftruncate(fd, st.Size)) })
}

// offsets returns the places of a chain's blocks.
func (a *agent) offsets(h pool.Hashes) (out []int64) {
	b := a.batch(0, h, 0)
	a.Acquire(b)
	for i := range b.Slots {
		out = append(out, b.Slots[i].Off)
	}
	a.Release(b.Slots, b.Status)
	return out
}

// TestBadPageAtTheSender: a page that the sender cannot read costs the blocks on it, not the
// connection, and not the process.
func TestBadPageAtTheSender(t *testing.T) {
	for _, c := range []struct {
		name   string
		tls    bool
		noSums bool
	}{{name: "key"}, {name: "tls", tls: true}, {name: "no sums", noSums: true}} {
		t.Run(c.name, func(t *testing.T) {
			spec := specOf(1, 64<<10)
			p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
			check(t, p.Populated())
			h := chain("a", 20)
			p.saveGroup(0, h, 1)
			cfg, ccfg := p.config(), d.clientConfig()
			if c.tls {
				cfg.Auth = tlsAuth(t)
				ccfg.Auth = cfg.Auth
			}
			cfg.NoSums = c.noSums
			s, client := serve(t, cfg), newClient(t, ccfg)
			at := p.offsets(h)
			tear(t, p, at[12]+20_000)
			bad := 0
			for _, off := range at {
				if off+64<<10 > (at[12]+20_000)&^4095 {
					bad++
				}
			}
			r := d.request("", h)
			r.Groups = r.Groups[:1]
			got, err := fetchAll(t, client, s.Addr().String(), r)
			if err != nil || got.Blocks != 20-bad || got.Failed[Corrupt]+got.Failed[Missing] != bad ||
				got.Failed[Corrupt] == 0 {
				t.Errorf("%d are bad: %+v, %v", bad, got, err)
			}
			if n := d.has(h); n != 20-bad {
				t.Errorf("%d blocks", n)
			}
			if st := p.Stats(); st.Bad.Pages == 0 {
				t.Errorf("no page was retired: %+v", st.Bad)
			}
			if st := client.Stats(); st.Done[EndLost] != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// TestBadPageAtTheReceiver: a page that cannot be written costs the block, is retired, and leaves
// the connection at the next block's first byte.
func TestBadPageAtTheReceiver(t *testing.T) {
	for _, c := range []struct {
		name string
		tls  bool
	}{{name: "key"}, {name: "tls", tls: true}} {
		t.Run(c.name, func(t *testing.T) {
			spec := specOf(1, 64<<10)
			p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
			check(t, d.Populated())
			h := chain("a", 20)
			p.saveGroup(0, h, 1)
			cfg, ccfg := p.config(), d.clientConfig()
			if c.tls {
				cfg.Auth = tlsAuth(t)
				ccfg.Auth = cfg.Auth
			}
			ccfg.Streams = 1
			s, client := serve(t, cfg), newClient(t, ccfg)
			d.saveGroup(0, chain("mine", 1), 1)
			first := d.offsets(chain("mine", 1))[0]
			tear(t, d, first+8*64<<10+20_000)
			r := d.request("", h)
			r.Groups = r.Groups[:1]
			got, err := fetchAll(t, client, s.Addr().String(), r)
			if err != nil || got.Failed[BadPage] == 0 || got.Blocks+got.Failed[BadPage] != 20 || got.Blocks == 0 {
				t.Errorf("%+v, %v", got, err)
			}
			if n := d.has(h); n != got.Blocks {
				t.Errorf("%d blocks are there, %d were stored", n, got.Blocks)
			}
			if st := d.Stats(); st.Bad.Pages == 0 {
				t.Errorf("no page was retired: %+v", st.Bad)
			}
		})
	}
}
