package disk

import (
	"bufio"
	"container/list"
	"encoding/json"
	"os"
	"testing"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/trace/tracetest"
)

type request struct {
	Tokens int   `json:"input_length"`
	Blocks []int `json:"hash_ids"`
}

// readTrace reads the conversation trace, which the figures in docs/TIERS.md are from.
func readTrace(t testing.TB) (all []request) {
	f, err := os.Open(tracetest.Conversation(t))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var r request
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	return all
}

// twoTiers is memory with LRU above a disk that works like this store: it evicts the oldest segment
// first, and writes blocks again that were read. Blocks saved or used in memory, and not on the
// disk, are offered to it.
type twoTiers struct {
	o      Options
	seen   *seen
	memory map[int]*list.Element
	recent list.List // of block numbers, most recent first
	room   int       // blocks of memory

	disk     map[int]*simBlock
	segments [][]int
	live     int // blocks in segments, dead ones too
	diskRoom int

	blocks, hits, diskHits, written int
}

type simBlock struct{ uses int }

const simSegment = 256 // blocks

func (s *twoTiers) run(all []request) {
	for i := range all {
		s.request(&all[i])
	}
}

func (s *twoTiers) request(r *request) {
	hit := true
	for _, b := range r.Blocks {
		s.blocks++
		e, inMemory := s.memory[b]
		d := s.disk[b]
		if hit = hit && (inMemory || d != nil); hit {
			s.hits++
			if !inMemory {
				s.diskHits++
				d.uses = min(d.uses+1, maxUses)
			}
		}
		if inMemory {
			s.recent.MoveToFront(e)
		} else {
			s.toMemory(b)
		}
		if d == nil {
			s.offer(b, Hint{Used: hit, Tokens: r.Tokens})
		}
	}
}

func (s *twoTiers) toMemory(b int) {
	if s.recent.Len() == s.room {
		delete(s.memory, s.recent.Remove(s.recent.Back()).(int))
	}
	s.memory[b] = s.recent.PushFront(b)
}

func (s *twoTiers) offer(b int, h Hint) {
	s.o.Hint = func(*pool.Item) Hint { return h }
	it := pool.Item{Key: keyOf(b)}
	if s.diskRoom == 0 {
		return
	}
	if s.seen.admits(&s.o, &it) {
		s.write(b, 0)
	}
}

func (s *twoTiers) write(b, uses int) {
	if n := len(s.segments); n == 0 || len(s.segments[n-1]) == simSegment {
		for s.live+simSegment > s.diskRoom {
			s.evict()
		}
		s.segments = append(s.segments, nil)
	}
	s.written++
	s.live++
	last := len(s.segments) - 1
	s.segments[last] = append(s.segments[last], b)
	s.disk[b] = &simBlock{uses: uses}
}

// evict frees the oldest segment; at most half of it is written again.
func (s *twoTiers) evict() {
	old := s.segments[0]
	s.segments = s.segments[1:]
	s.live -= len(old)
	again := 0
	for _, b := range old {
		d := s.disk[b]
		delete(s.disk, b)
		if d.uses > 0 && again < simSegment/2 {
			again++
			if n := len(s.segments); n == 0 || len(s.segments[n-1]) == simSegment {
				s.segments = append(s.segments, nil)
			}
			s.write(b, d.uses/2)
		}
	}
}

// TestAdmissionOnATrace computes the figures in docs/TIERS.md.
func TestAdmissionOnATrace(t *testing.T) {
	if testing.Short() {
		t.Skip("LONG: a trace")
	}
	all := readTrace(t)
	type result struct{ hits, written float64 }
	results := map[string]result{}
	sizes := []int{30_000}
	if os.Getenv("KVAGENT_LONG") != "" {
		sizes = []int{0, 10_000, 30_000, 60_000}
	}
	for _, disk := range sizes {
		for _, c := range []struct {
			name string
			a    Admission
		}{
			{"all", Admission{}},
			{"again", Admission{Again: true}},
			{"again or 8,000 tokens", Admission{Again: true, Tokens: 8000}},
			{"again or 16,000 tokens", Admission{Again: true, Tokens: 16000}},
		} {
			if disk == 0 && c.name != "all" {
				continue
			}
			s := &twoTiers{
				o: Options{Admission: c.a}, seen: newSeen(c.a), room: 3000, diskRoom: disk,
				memory: map[int]*list.Element{}, disk: map[int]*simBlock{},
			}
			s.run(all)
			r := result{float64(s.hits) / float64(s.blocks), float64(s.written) / float64(s.blocks)}
			t.Logf("disk of %6d blocks, %-22s hit rate %.4f (disk %.4f), written %.4f of the blocks asked for",
				disk, c.name, r.hits, float64(s.diskHits)/float64(s.blocks), r.written)
			if disk == 30_000 {
				results[c.name] = r
			}
		}
	}
	if a, b := results["all"], results["again"]; b.written > a.written*0.5 {
		t.Errorf("with Again %.3f is written, without it %.3f: want half at most", b.written, a.written)
	}
}
