package dram

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

const (
	stormRounds = 30 // unless stormRoundsEnv says another number
	stormLeast  = 10 // rounds, and more while there is time
	stormWithin = 12 * time.Second
	stormFor    = 30 * time.Millisecond  // at most, from a full pool on to the kill
	stormBack   = 0.95                   // of the blocks that were committed and not evicted
	stormUsed   = 0.8                    // of the pool, when it is killed
	roundsEnv   = "KVAGENT_STORM_ROUNDS" // a number
	fillWithin  = 20 * time.Second
)

// TestKilledInAStorm kills a process at random moments while it saves, loads, evicts and resets,
// and opens its pool.
func TestKilledInAStorm(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a torture")
	}
	rounds, asked := stormRounds, os.Getenv(roundsEnv) != ""
	if text := os.Getenv(roundsEnv); text != "" {
		var err error
		if rounds, err = strconv.Atoi(text); err != nil {
			t.Fatalf("%s: %v", roundsEnv, err)
		}
	}
	dir, err := os.MkdirTemp("/dev/shm", "kvagent-storm-")
	if err != nil {
		t.Skipf("SKIPPED: no tmpfs on /dev/shm: %v", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d, %d rounds", seed, rounds)
	s := stormCheck{
		t: t, path: filepath.Join(dir, "pool"), rng: rand.New(rand.NewPCG(seed, 0)), stored: map[uint64]int{},
		over: map[uint64]bool{},
	}
	for began := time.Now(); int(s.number) < rounds &&
		(asked || s.number < stormLeast || time.Since(began) < stormWithin); {
		s.round()
	}
	rounds = int(s.number)
	if s.taken == 0 {
		t.Error("a storm without weather: no slab was taken")
	}
	t.Logf("%d kills: %d blocks were committed, %d evicted or reset, %d slabs taken; "+
		"of %d that had to be there after a kill %d were (%.3f %%); slowest recovery %v",
		rounds, s.committed, s.evicted, s.taken, s.expected, s.back, 100*float64(s.back)/float64(s.expected), s.slowest)
	if s.thin*20 > rounds {
		t.Errorf("less than %.0f %% of the pool was used in %d of %d rounds", 100*stormUsed, s.thin, rounds)
	}
	if s.committed == 0 || s.evicted == 0 || s.resets == 0 {
		t.Errorf("a storm without weather: %d commits, %d evictions, %d resets", s.committed, s.evicted, s.resets)
	}
}

// stormCheck is the parent's knowledge.
type stormCheck struct {
	t      *testing.T
	path   string
	rng    *rand.Rand
	number uint64          // of the round
	stored map[uint64]int  // space of each block that was committed and neither evicted nor reset
	over   map[uint64]bool // blocks that were stored before a reset that is done: none may come back

	committed, evicted, resets, expected, back int
	thin                                       int // rounds in which less than stormUsed of the pool was used
	taken                                      uint64
	slowest                                    time.Duration
}

func (s *stormCheck) round() {
	s.number++
	said := s.killed()
	s.hear(said)
	began := time.Now()
	p, err := openStorm(s.path, nil)
	if err != nil {
		s.t.Fatalf("round %d: %v", s.number, err)
	}
	s.slowest = max(s.slowest, time.Since(began))
	if r := p.Info().Recovery; r.New || r.Cold != "" || r.Damaged > 0 || len(r.Notes) > 0 {
		s.t.Errorf("round %d: %+v", s.number, r)
	}
	s.compare(p)
	if err := p.Check(); err != nil {
		s.t.Fatalf("round %d: %v", s.number, err)
	}
	if st := p.Stats(); float64(st.Used) < stormUsed*float64(st.Capacity) {
		s.thin++ // right after a reset
	}
	if err := p.Close(); err != nil {
		s.t.Fatal(err)
	}
}

// killed runs a storm, kills it, and returns its reports.
func (s *stormCheck) killed() []byte {
	self, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		s.t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), StormEnv+"="+s.path, stormSeed+"="+strconv.FormatUint(s.number, 10))
	var stderr bytes.Buffer
	cmd.Stderr, cmd.ExtraFiles = &stderr, []*os.File{w}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	w.Close()
	late := time.AfterFunc(fillWithin, func() { cmd.Process.Kill() })
	defer late.Stop()
	var said bytes.Buffer
	buf := make([]byte, 64<<10)
	for begun := false; ; {
		n, err := r.Read(buf)
		said.Write(buf[:n])
		if err != nil {
			break
		}
		if !begun && bytes.Contains(buf[:n], []byte{saidFull, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}) {
			begun = true
			time.AfterFunc(time.Duration(s.rng.Int64N(int64(stormFor))), func() { cmd.Process.Kill() })
		}
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Exited() {
		s.t.Fatalf("round %d: the storm ended by itself: %v\n%s", s.number, err, &stderr)
	}
	return said.Bytes()
}

// hear applies the reports. A block's number is used once, so an evicted block stays evicted, in
// any order of reports.
func (s *stormCheck) hear(said []byte) {
	evicted := map[uint64]bool{}
	var resetting []uint64
	taken := uint64(0)
	defer func() { s.taken += taken }()
	for r := bytes.NewReader(said); ; {
		var b [stormRecord]byte
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return
		}
		number := binary.LittleEndian.Uint64(b[8:])
		switch b[0] {
		case saidCommitted:
			s.committed++
			if !evicted[number] {
				s.stored[number] = int(b[1])
			}
		case saidEvicted:
			s.evicted++
			evicted[number] = true
			delete(s.stored, number)
		case saidTaken:
			taken = number
		case saidResetting:
			resetting = s.storedIn(resetSpace)
		case saidReset:
			s.resets++
			for _, number := range resetting {
				s.over[number] = true
				delete(s.stored, number)
			}
		}
	}
}

func (s *stormCheck) storedIn(space int) (out []uint64) {
	for number, in := range s.stored {
		if in == space {
			out = append(out, number)
		}
	}
	return out
}

// compare looks for every block that must be there, and at every byte of those that are.
func (s *stormCheck) compare(p *Pool) {
	c := p.core
	there := map[uint64]bool{}
	for e := uint32(1); e < c.high; e++ {
		if r := &c.recs.All[e]; r.is(flagVisible) {
			there[r.hash.A] = true
			if s.over[r.hash.A] {
				s.t.Fatalf("round %d: block %x came back, stored before a reset", s.number, r.hash.A)
			}
			s.verify(p, e)
		}
	}
	expected, back := 0, 0
	for number, space := range s.stored {
		if space == resetSpace {
			continue // it may be gone because of a reset that had begun
		}
		expected++
		if there[number] {
			back++
			continue
		}
		delete(s.stored, number)
	}
	s.expected, s.back = s.expected+expected, s.back+back
	if float64(back) < stormBack*float64(expected) {
		s.t.Errorf("round %d: %d of %d blocks came back", s.number, back, expected)
	}
}

// verify compares all shards of an entry with what belongs to its key, and their checksums.
func (s *stormCheck) verify(p *Pool, e uint32) {
	c := p.core
	r := &c.recs.All[e]
	sp := c.realms[r.ident.realm()].space
	for shard := range sp.spec.Shards {
		slot := c.slot(e, uint8(shard))
		got := p.base[slot.Off:][:slot.Len]
		want := make([]byte, slot.Len)
		stormBytes(want, r.hash.A, uint8(shard))
		k := pool.Key{Space: sp.spec.Fingerprint, Shard: uint8(shard), Hash: pool.MakeHash(stormHash(r.hash.A))}
		if !bytes.Equal(got, want) || pool.Sum(k.Seed(slot.Len), got) != slot.Sum {
			s.t.Fatalf("round %d: wrong bytes in block %x, shard %d", s.number, r.hash.A, shard)
		}
	}
}
