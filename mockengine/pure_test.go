package mockengine

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/trace/tracetest"
)

func one(int) int { return 0 }

// The simulation reproduces what is known of the conversation trace.
func TestSimulationKnowsTheTrace(t *testing.T) {
	records, err := ReadTrace(tracetest.Conversation(t), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		pool int
		want float64
	}{{0, 0.3664}, {50000, 0.355}, {30000, 0.326}, {10000, 0.211}, {3000, 0.065}} {
		if got := Simulate(records, 1, 1, c.pool, one); got < c.want-0.0006 || got > c.want+0.0006 {
			t.Errorf("LRU of %d blocks: hit rate %.4f, known is %.4f", c.pool, got, c.want)
		}
	}
}

func TestSimulation(t *testing.T) {
	turns := func(i int) int { return i % 2 }
	records := []Record{{HashIDs: []uint64{1, 2, 3}}, {HashIDs: []uint64{1, 2, 3}}, {HashIDs: []uint64{1, 2, 4, 5}},
		{HashIDs: []uint64{1, 2, 3}}}
	for _, c := range []struct {
		name            string
		engines, cache  int
		pool            int
		deal            func(int) int
		hits, allBlocks float64
	}{
		{"everything fits", 1, 10, 0, one, 3 + 2 + 3, 13},
		{"own cache only", 2, 10, 1, turns, 0 + 1 + 2 + 3, 13},
		{"a suffix goes before its prefix", 1, 4, 4, one, 3 + 2 + 2, 13},
	} {
		if got := Simulate(records, c.engines, c.cache, c.pool, c.deal); got != c.hits/c.allBlocks {
			t.Errorf("%s: hit rate %v, want %v of %v", c.name, got, c.hits, c.allBlocks)
		}
	}
}

// TestTraceIsReplayed reads what there is to replay in the order of time: a request without blocks
// is passed over, one without lengths has whole blocks and no answer.
func TestTraceIsReplayed(t *testing.T) {
	records, err := readText(t,
		`{"timestamp": 9, "hash_ids": [3, 4]}`+"\r\n\n"+goodLine+`{"timestamp": 6, "input_length": 0, "hash_ids": []}`)
	want := []Record{{5, 10, []uint64{1, 2}}, {9, 0, []uint64{3, 4}}}
	if err != nil || !reflect.DeepEqual(records, want) {
		t.Errorf("%v, %v; want %v", records, err, want)
	}
}

func TestTraceIsChecked(t *testing.T) {
	for _, c := range []struct{ line, want string }{
		{`{"timestamp": -4, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]}`,
			":2: timestamp is -4, must be 0 to"},
		{`{"timestamp": 6, "input_length": 600, "output_length": 10}`, ":2: hash_ids is missing"},
		{`{"timestamp": 4, "hash_ids": [0` + strings.Repeat(",0", MaxTraceBlocks) + `]}`,
			":2: hash_ids has 8193 numbers, must have at most 8192"},
		{`{"timestamp": 4, "input_length": 0, "output_length": 10, "hash_ids": [1]}`,
			":2: input_length is 0, must be an integer from 1 to 512 with 1 hash_ids"},
		{`{"timestamp": 6, "input_length": 1, "output_length": -1, "hash_ids": [1]}`,
			":2: output_length is -1, must be an integer from 0 to 1048576"},
		{`{"timestamp": 6`, ":2: "},
	} {
		if _, err := readText(t, goodLine+c.line); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.200s: %v, want %q", c.line, err, c.want)
		}
	}
}

const goodLine = `{"timestamp": 5, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]}` + "\n"

func readText(t *testing.T, text string) ([]Record, error) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return ReadTrace(file, 0)
}

// Content is the same however it is cut into pieces, differs in every respect it is made from, and
// a wrong byte counts.
func TestContent(t *testing.T) {
	for _, c := range []struct{ tokens, bytes int }{{16, 128}, {16, 1024}, {64, 128}} {
		s, err := newShape(c.tokens, c.bytes)
		if err != nil {
			t.Fatal(err)
		}
		tokens := make([]uint32, c.tokens)
		promptTokens(tokens, 7)
		whole, _ := s.appendBase(nil, startChain(&noHash), 0, tokens)
		var parts []uint64
		state := startChain(&noHash)
		for i := range tokens {
			if s.complete(i) != len(parts) {
				t.Fatalf("%d tokens complete %d words, %d are there", i, s.complete(i), len(parts))
			}
			parts, state = s.appendBase(parts, state, i, tokens[i:i+1])
		}
		mem := make([]byte, c.bytes)
		fill(mem, parts, salt(0, 1, 2))
		if n := wrong(mem, whole, salt(0, 1, 2)); n != 0 || len(whole)*wordBytes != c.bytes {
			t.Errorf("%d tokens in %d bytes: %d wrong bytes, %d words", c.tokens, c.bytes, n, len(whole))
		}
		mem[c.bytes/2] ^= 1
		if n := wrong(mem, whole, salt(0, 1, 2)); n != 1 {
			t.Errorf("one byte was changed, %d are wrong", n)
		}
		tokens[0]++
		other, _ := s.appendBase(nil, startChain(&noHash), 0, tokens)
		for _, n := range []int{wrong(mem, whole, salt(0, 1, 3)), wrong(mem, whole, salt(0, 2, 2)),
			wrong(mem, whole, salt(1, 1, 2)), wrong(mem, other, salt(0, 1, 2))} {
			if n < c.bytes*9/10 {
				t.Errorf("another rank, layer, group or first token: only %d of %d bytes differ", n, c.bytes)
			}
		}
	}
	if _, err := newShape(40, 128); err == nil {
		t.Error("40 tokens in 16 words: no error")
	}
}

// The block pool against a slow obvious one.
func TestBlockPool(t *testing.T) {
	rng := rand.New(rand.NewPCG(testSeed(t), 0))
	const n = 20
	p := newBlockPool(n)
	refs := make(map[BlockID]int)
	keys := make(map[cacheKey]BlockID)
	for range 20000 {
		switch id := BlockID(1 + rng.IntN(n)); rng.IntN(4) {
		case 0:
			got, ok := p.take()
			if ok != (len(refs) < n) || refs[got] != 0 {
				t.Fatalf("take gave %d, %v with %d of %d in use", got, ok, len(refs), n)
			}
			if ok {
				refs[got] = 1
				for k, b := range keys {
					if b == got {
						delete(keys, k)
					}
				}
			}
		case 1:
			if refs[id] > 0 {
				k := cacheKey{hash: Hash{byte(rng.IntN(40))}}
				if _, taken := keys[k]; !taken && !p.blocks[id].published {
					keys[k] = id
				}
				p.publish(id, k)
			}
		case 2:
			if refs[id] > 0 {
				p.unref(id)
				if refs[id]--; refs[id] == 0 {
					delete(refs, id)
				}
			}
		case 3:
			for k, want := range keys {
				if got, ok := p.find(k); !ok || got != want {
					t.Fatalf("find gave %d, %v, want %d", got, ok, want)
				}
				p.ref(want)
				refs[want]++
				break
			}
		}
		if p.free != n-len(refs) {
			t.Fatalf("%d blocks are free, want %d", p.free, n-len(refs))
		}
	}
}

func BenchmarkFill(b *testing.B) {
	bases := make([]uint64, 4096)
	mem := make([]byte, len(bases)*wordBytes)
	b.SetBytes(int64(len(mem)))
	for b.Loop() {
		fill(mem, bases, 1)
	}
}

// BenchmarkCopy is what the two are to be compared with.
func BenchmarkCopy(b *testing.B) {
	from, to := make([]byte, 32<<10), make([]byte, 32<<10)
	b.SetBytes(int64(len(to)))
	for b.Loop() {
		copy(to, from)
	}
}

func BenchmarkCheck(b *testing.B) {
	bases := make([]uint64, 4096)
	mem := make([]byte, len(bases)*wordBytes)
	fill(mem, bases, 1)
	b.SetBytes(int64(len(mem)))
	for b.Loop() {
		if wrong(mem, bases, 1) != 0 {
			b.Fatal("wrong")
		}
	}
}
