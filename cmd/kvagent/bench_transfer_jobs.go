package main

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/transfer"
)

// move saves a new chain of blocks, or loads the last one, or both at once, by the worker, and gives 10^9 bytes per
// second. Engine blocks are taken in random order.
func (b *transferBench) move(blocks int, save, load bool) (float64, error) {
	var jobs []transfer.Job
	if load {
		jobs = append(jobs, b.chain(transfer.Load, b.chains, blocks)...)
	}
	if save {
		b.chains++
		jobs = append(jobs, b.chain(transfer.Save, b.chains, blocks)...)
	}
	var want int64
	start := time.Now()
	for _, j := range jobs {
		if err := b.worker.Submit(j); err != nil {
			return 0, err
		}
		want += int64(len(j.Sections[0].Blocks)) * int64(b.segment*benchSegments)
	}
	var moved int64
	for range jobs {
		moved += (<-b.done).Bytes
	}
	took := time.Since(start)
	if moved != want {
		return 0, fmt.Errorf("%d bytes moved, want %d", moved, want)
	}
	return float64(moved) / took.Seconds() / 1e9, nil
}

// chain makes jobs of so many blocks; each is a prompt of its own.
func (b *transferBench) chain(kind transfer.Kind, chain, blocks int) []transfer.Job {
	order := b.random.Perm(b.blocks)
	hashes := make([]byte, blocks*pool.MaxHashLen)
	for i := range blocks {
		binary.LittleEndian.PutUint64(hashes[i*pool.MaxHashLen:], uint64(chain)<<32|uint64(i)+1)
	}
	var jobs []transfer.Job
	for from := 0; from < blocks; from += benchJobBlocks {
		to := min(from+benchJobBlocks, blocks)
		section := transfer.Section{Hashes: pool.Chain(hashes[from*pool.MaxHashLen:to*pool.MaxHashLen], pool.MaxHashLen)}
		for _, block := range order[from:to] {
			section.Blocks = append(section.Blocks, uint32(block))
		}
		b.jobs++
		jobs = append(jobs, transfer.Job{
			ID: b.jobs, Kind: kind, Epoch: 1, Event: cudaipc.None, Revoke: cudaipc.None, Sections: []transfer.Section{section},
		})
	}
	return jobs
}
