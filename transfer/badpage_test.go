package transfer

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
	"github.com/kvagent/kvagent/cudaipc/mover"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// torn is a station on a pool of 64 blocks whose arena can lose its end: for every process that has
// it mapped.
type torn struct {
	*station
	dram *dram.Pool
}

// newTorn stores blocks 0 to 63 in a station on a device that open makes of an arena.
func newTorn(
	t *testing.T, open func(fd int, size int64) (cudaipc.Device, error), change ...func(*Config),
) *torn {
	t.Helper()
	const bytes = 64 * blockSize
	p, err := dram.Open(dram.Options{Bytes: bytes, SlabBytes: bytes / 4, HugePages: dram.Off})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Populated(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	_, fd := p.Arena()
	n := newNodeOn(t, 4, func(int, int64) (cudaipc.Device, error) { return open(fd, bytes) })
	s := n.join(t, func(c *Config) {
		c.Slots = p
		if _, err := p.OpenSpace(c.Spec); err != nil { // its id is that in the node's own pool
			t.Fatal(err)
		}
		for _, one := range change {
			one(c)
		}
	})
	for i := range uint32(64) {
		s.write(i, uint64(i))
	}
	s.finish(save(1, section(0, 64, 0)), pool.OK)
	return &torn{station: s, dram: p}
}

// tear takes the last page of the arena away.
func (s *torn) tear() {
	s.t.Helper()
	_, fd := s.dram.Arena()
	if err := unix.Ftruncate(fd, 64*blockSize-4096); err != nil {
		s.t.Fatal(err)
	}
}

// lost loads all blocks, and gives the one that is not there; everything else has its bytes.
func (s *torn) lost(id uint64, want pool.Status) (lost int) {
	s.t.Helper()
	lost = -1
	s.submit(load(id, section(0, 64, 100)))
	for i, status := range s.completion().Status {
		switch {
		case status == pool.OK:
			s.expect(uint32(100+i), uint64(i), "beside a bad page")
		case status == want && lost < 0:
			lost = i
		default:
			s.t.Errorf("block %d: status %d, want one with %d", i, status, want)
		}
	}
	if lost < 0 {
		s.t.Fatal("no block is lost")
	}
	return lost
}

var tornDevices = map[string]func(fd int, size int64) (cudaipc.Device, error){
	"host": openHost,
	"host in a mover": func(fd int, size int64) (cudaipc.Device, error) {
		return mover.New(mover.Options{
			Name: "test", Device: cudaipc.HostDevice, ArenaFD: fd, ArenaSize: size, Node: -1,
			Command: devicetest.MoverCommand, Env: devicetest.MoverEnv,
		})
	},
}

// TestBadPageOnALoad expects a block whose page cannot be read not to be delivered, to be reported,
// and not to be promised again. Stored again it lies elsewhere.
func TestBadPageOnALoad(t *testing.T) {
	for name, open := range tornDevices {
		t.Run(name, func(t *testing.T) {
			s := newTorn(t, open)
			s.tear()
			lost := s.lost(2, pool.Corrupt)
			if got := s.lost(3, pool.Missing); got != lost {
				t.Errorf("block %d was lost first, then %d", lost, got)
			}
			s.finish(save(4, section(lost, 1, uint32(lost))), pool.OK)
			s.finish(load(5, section(lost, 1, 100)), pool.OK)
			s.expect(100, uint64(lost), "stored again")
			if st := s.dram.Stats(); st.Bad.Pages != 1 || st.Bad.Dropped != 1 || st.PinnedEntries != 0 {
				t.Errorf("%+v, %d pinned", st.Bad, st.PinnedEntries)
			}
		})
	}
}

// TestBadPageOnASave expects a block that was to lie on a bad page not to be stored, and the next
// one to lie elsewhere.
func TestBadPageOnASave(t *testing.T) {
	for name, open := range tornDevices {
		t.Run(name, func(t *testing.T) {
			s := newTorn(t, open)
			if _, err := s.dram.ResetSpace(s.space); err != nil {
				t.Fatal(err)
			}
			s.dram.Sweep()
			s.tear()
			job := save(2, section(0, 64, 0))
			job.Epoch = 2
			s.submit(job)
			failed := 0
			for _, status := range s.completion().Status {
				if status == Failed {
					failed++
				} else if status != pool.OK {
					t.Errorf("status %d", status)
				}
			}
			if failed != 1 {
				t.Errorf("%d blocks failed, one lay on the page", failed)
			}
			job.ID = 3
			s.submit(job) // 63 have room: one of the others goes for it
			for i, status := range s.completion().Status {
				if status != pool.OK && status != pool.Exists && status != pool.Busy {
					t.Errorf("block %d: status %d", i, status)
				}
			}
			if st := s.dram.Stats(); st.Bad.Pages != 1 || st.Entries != 63 {
				t.Errorf("%+v, %d entries", st.Bad, st.Entries)
			}
		})
	}
}

// failing is a peer whose copies all fail once it is told to, as those of a mover that a driver's
// fault killed.
type failing struct {
	cudaipc.Peer
	on chan struct{} // closed: they fail
}

func (f *failing) Copy(c *cudaipc.Copy) (cudaipc.Ticket, error) {
	ticket, err := f.Peer.Copy(c)
	return func(timeout time.Duration) (cudaipc.Done, bool, error) {
		d, ok, err := ticket(timeout)
		select {
		case <-f.on:
			if ok {
				return cudaipc.Done{}, false, cudaipc.ErrLost
			}
		default:
		}
		return d, ok, err
	}, err
}

// TestBadPageThatKillsTheDevice expects the block on the bad page to be dropped when its copy ended
// with its device, so that it does not end the next device too; the others stay.
func TestBadPageThatKillsTheDevice(t *testing.T) {
	f := &failing{on: make(chan struct{})}
	s := newTorn(t, tornDevices["host"], func(c *Config) { f.Peer, c.Peer = c.Peer, f })
	s.tear()
	close(f.on)
	s.submit(load(2, section(0, 64, 100)))
	corrupt := 0
	for i, status := range s.completion().Status {
		if status == pool.Corrupt {
			corrupt++
		} else if status != Failed {
			t.Errorf("block %d: status %d", i, status)
		}
	}
	if st := s.dram.Stats(); corrupt != 1 || st.Bad.Pages != 1 || st.Entries != 63 {
		t.Errorf("%d blocks are corrupt, %+v, %d entries", corrupt, st.Bad, st.Entries)
	}
}
