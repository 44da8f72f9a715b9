package bench

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// filledIndex is a pool full of chains whose data was never written.
type filledIndex struct {
	pool    *dram.Pool
	space   pool.SpaceID
	shards  int
	blocks  int
	longest time.Duration // reservation of one chain
	filling time.Duration
}

func fillIndex(blocks, shards int) (*filledIndex, error) {
	p, err := dram.Open(dram.Options{Bytes: int64(blocks+blocks/8)*int64(shards)*indexBytesPerShard + 64<<20,
		Virtual: true})
	if err != nil {
		return nil, err
	}
	f := &filledIndex{pool: p, shards: shards, blocks: blocks}
	bytes := slices.Repeat([]uint32{indexBytesPerShard}, shards)
	f.space, err = p.OpenSpace(pool.Spec{Identity: []byte("bench"), Shards: shards,
		Groups: []pool.Group{{BlockTokens: 16, ShardBytes: bytes}}})
	if err != nil {
		return nil, err
	}
	start := time.Now()
	for first := 0; first < blocks; first += indexChain {
		if err := f.insert(first/indexChain, min(indexChain, blocks-first)); err != nil {
			return nil, err
		}
	}
	f.filling = time.Since(start)
	return f, nil
}

func (f *filledIndex) insert(number, n int) error {
	h := benchChain(nil, number, n)
	b := pool.Batch{Space: f.space, Epoch: 1, Hashes: h, Status: make([]pool.Status, n), Slots: make([]pool.Slot, n)}
	if number%indexPinChains != 0 {
		before := benchChain(nil, number-1, indexChain)
		b.Parent = before.At(indexChain - 1)
	}
	for shard := range f.shards {
		b.Shard = uint8(shard)
		start := time.Now()
		f.pool.Reserve(&b)
		f.longest = max(f.longest, time.Since(start))
		for i, s := range b.Status {
			if s != pool.OK {
				return fmt.Errorf("block %d of chain %d: status %d", i, number, s)
			}
		}
		f.pool.Commit(b.Slots, 1, b.Status)
	}
	return nil
}

// benchChain appends the hashes of a chain to blob: pseudo-random bytes.
func benchChain(blob []byte, number, n int) pool.Hashes {
	r := rand.New(rand.NewPCG(uint64(number), 0x6b76))
	for range n * pool.MaxHashLen / 8 {
		blob = binary.LittleEndian.AppendUint64(blob, r.Uint64())
	}
	return pool.Chain(blob, pool.MaxHashLen)
}

func (f *filledIndex) bytesPerBlock() float64 {
	return float64(f.pool.Stats().IndexBytes) / float64(f.blocks)
}

func measureIndexSize(n int) (row indexRow, err error) {
	f, err := fillIndex(n, 1)
	if err != nil {
		return row, err
	}
	defer f.pool.Close()
	row = indexRow{
		Blocks: n, BytesPerBlock: f.bytesPerBlock(), InsertMaxUs: float64(f.longest.Nanoseconds()) / 1e3,
		InsertNs: float64(f.filling.Nanoseconds()) / float64(n),
	}
	queries := f.draw()
	if row.NsPerBlock, err = f.timeExists(queries); err != nil {
		return row, err
	}
	if row.PinUs2048, err = f.timePin(); err != nil {
		return row, err
	}
	row.MapNsPerBlock = timeMap(n, queries)
	return row, nil
}

// draw returns one list of chains for each round.
func (f *filledIndex) draw() (rounds [][]pool.Hashes) {
	whole := f.blocks / indexChain
	r := rand.New(rand.NewPCG(1, 2))
	for range indexRounds {
		queries := make([]pool.Hashes, min(whole, indexQueryChains))
		blob := make([]byte, 0, len(queries)*indexChain*pool.MaxHashLen)
		for i := range queries {
			at := len(blob)
			blob = benchChain(blob, r.IntN(whole), indexChain).Blob
			queries[i] = pool.Chain(blob[at:], pool.MaxHashLen)
		}
		rounds = append(rounds, queries)
	}
	return rounds
}

func (f *filledIndex) timeExists(rounds [][]pool.Hashes) (ns float64, err error) {
	present := make([]bool, indexChain)
	var took []float64
	for _, queries := range rounds {
		hits := 0
		start := time.Now()
		for i := range queries {
			f.pool.Exists(f.space, 0, queries[i], present)
			if present[0] && present[indexChain-1] {
				hits++
			}
		}
		took = append(took, float64(time.Since(start).Nanoseconds())/float64(len(queries)*indexChain))
		if hits != len(queries) {
			return 0, fmt.Errorf("%d of %d chains found, all are stored", hits, len(queries))
		}
	}
	return median(took), nil
}

// timePin pins prompts of indexPinChain blocks, drawn at random.
func (f *filledIndex) timePin() (us float64, err error) {
	r := rand.New(rand.NewPCG(3, 4))
	refs := make([]pool.Ref, 0, indexPinChain)
	var took []float64
	for range 101 {
		var blob []byte
		first := r.IntN(f.blocks/indexPinChain) * indexPinChains
		for i := range indexPinChains {
			blob = benchChain(blob, first+i, indexChain).Blob
		}
		start := time.Now()
		n, pinned, _ := f.pool.Pin(f.space, 0, pool.Chain(blob, pool.MaxHashLen), 1<<40, refs)
		took = append(took, float64(time.Since(start).Nanoseconds())/1e3)
		if n != indexPinChain {
			return 0, fmt.Errorf("%d of %d blocks pinned, all are stored", n, indexPinChain)
		}
		f.pool.Unpin(pinned)
	}
	return median(took), nil
}

// timeMap is the reference: a Go map of the same hashes.
func timeMap(n int, rounds [][]pool.Hashes) float64 {
	m := make(map[[pool.MaxHashLen]byte]uint32, n)
	var blob []byte
	for first := 0; first < n; first += indexChain {
		h := benchChain(blob[:0], first/indexChain, min(indexChain, n-first))
		blob = h.Blob
		for i := range h.N {
			m[[pool.MaxHashLen]byte(h.At(i))] = uint32(first + i)
		}
	}
	var took []float64
	found := 0
	for _, queries := range rounds {
		start := time.Now()
		for i := range queries {
			for j := range queries[i].N {
				if _, ok := m[[pool.MaxHashLen]byte(queries[i].At(j))]; ok {
					found++
				}
			}
		}
		took = append(took, float64(time.Since(start).Nanoseconds())/float64(len(queries)*indexChain))
	}
	runtime.KeepAlive(found)
	return median(took)
}
