package bench

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
)

// indexRow is one size of the index. Blocks are found in chains drawn at random.
type indexRow struct {
	Blocks        int     `json:"blocks"`
	NsPerBlock    float64 `json:"ns_per_block"`     // exists, all hits, median of the rounds
	BytesPerBlock float64 `json:"bytes_per_block"`  // hash table, headers and slot table, as resident
	MapNsPerBlock float64 `json:"map_ns_per_block"` // the same look-ups in map[[32]byte]uint32
	PinUs2048     float64 `json:"pin_us_2048"`      // pin of a chain of 2,048 blocks, median
	InsertNs      float64 `json:"insert_ns"`        // reserve and commit, per block
	InsertMaxUs   float64 `json:"insert_max_us"`    // longest reservation of a chain while the index grew
}

type indexReport struct {
	Rows []indexRow `json:"rows"`
	// BytesPerBlock8Shards is the same as bytes_per_block for entries of 8 shards, at most 56 more.
	BytesPerBlock8Shards float64 `json:"bytes_per_block_8_shards"`
	Blocks8Shards        int     `json:"blocks_8_shards"`
}

const (
	maxIndexBlocks     = 100_000_000
	wideIndexBlocks    = 1_000_000
	indexChain         = 128 // blocks of a chain
	indexRounds        = 5
	indexQueryChains   = 8192 // chains looked up in a round, at most
	indexPinChain      = 2048 // blocks of a prompt: so many chains hang on each other
	indexPinChains     = indexPinChain / indexChain
	indexShardsOfWide  = 8
	indexBytesPerShard = 1024
)

func indexCommand() *cobra.Command {
	var asJSON bool
	blocks := []int{10_000, 1_000_000, 10_000_000}
	cmd := &cobra.Command{
		Use:   "index",
		Short: "Time and memory of the pool's index, per block",
		Long: "Fills the index of a pool whose data is address space only, and looks up chains of " +
			fmt.Sprint(indexChain) + " blocks drawn at random.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			report, err := measureIndex(blocks, wideIndexBlocks)
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(report)
			}
			return printIndex(cmd.OutOrStdout(), report)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().IntSliceVar(&blocks, "blocks", blocks,
		fmt.Sprintf("blocks stored, one row each, %d to %d", indexPinChain, maxIndexBlocks))
	return cmd
}

func measureIndex(sizes []int, wide int) (r indexReport, err error) {
	for _, n := range sizes {
		if n < indexPinChain || n > maxIndexBlocks {
			return r, fmt.Errorf("--blocks has %d, must be %d to %d", n, indexPinChain, maxIndexBlocks)
		}
		row, err := measureIndexSize(n)
		if err != nil {
			return r, err
		}
		r.Rows = append(r.Rows, row)
	}
	f, err := fillIndex(wide, indexShardsOfWide)
	if err != nil {
		return r, err
	}
	defer f.pool.Close()
	r.Blocks8Shards, r.BytesPerBlock8Shards = wide, f.bytesPerBlock()
	return r, nil
}

func printIndex(w io.Writer, r indexReport) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t,
		"blocks\texists ns/block\tGo map ns/block\tpin 2,048 us\tinsert ns/block\tlongest us\tbytes/block\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%d\t%.0f\t%.0f\t%.0f\t%.0f\t%.0f\t%.1f\t\n", row.Blocks, row.NsPerBlock, row.MapNsPerBlock,
			row.PinUs2048, row.InsertNs, row.InsertMaxUs, row.BytesPerBlock)
	}
	fmt.Fprintf(t, "%d of 8 shards\t\t\t\t\t\t%.1f\t\n", r.Blocks8Shards, r.BytesPerBlock8Shards)
	return t.Flush()
}

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
