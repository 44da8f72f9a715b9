package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
)

// diskReport is the disk tier against its disk: the same bytes by the same calls past the page cache, in turn. GB/s are 10^9 bytes of
// blocks per second, medians; ratios are medians of the ratios of neighbouring measurements.
type diskReport struct {
	BlockBytes   int     `json:"block_bytes"`
	Bytes        int64   `json:"bytes"` // of one measurement
	Rounds       int     `json:"rounds"`
	Direct       bool    `json:"direct"` // past the page cache
	WriteGBps    float64 `json:"write_gbps"`
	RawWriteGBps float64 `json:"raw_write_gbps"`
	WriteRatio   float64 `json:"write_ratio"`
	ReadGBps     float64 `json:"read_gbps"`
	RawReadGBps  float64 `json:"raw_read_gbps"`
	ReadRatio    float64 `json:"read_ratio"`
	Ratio        float64 `json:"ratio"` // the smaller of both
}

type diskSettings struct {
	json       bool
	dir        string
	bytes      int64
	blockBytes int
	rounds     int
}

// Ranges of the settings.
const (
	minDiskBytes, maxDiskBytes           = 16 << 20, 1 << 40
	minDiskBlockBytes, maxDiskBlockBytes = 4 << 10, 4 << 20
	maxDiskRounds                        = 1000
)

func benchDiskCommand() *cobra.Command {
	s := diskSettings{}
	cmd := &cobra.Command{
		Use:   "disk",
		Short: "Writes and reads of the disk tier against its disk's own rate",
		Long: "Writes new blocks through the disk tier and reads them in random order, in batches, and in turn with that the same\n" +
			"bytes by plain O_DIRECT calls of the same size and depth. Needs (rounds + 2) * --bytes of disk in --dir, where it\n" +
			"makes a directory and removes it. Takes about 15 seconds on a disk of 1 GB/s.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := s.check(); err != nil {
				return configError(err)
			}
			report, err := benchDisk(&s)
			if err != nil {
				return err
			}
			return printDisk(cmd.OutOrStdout(), report, s.json)
		},
	}
	cmd.Flags().BoolVar(&s.json, "json", false, "print one JSON object")
	cmd.Flags().StringVar(&s.dir, "dir", os.TempDir(), "a directory on the disk")
	cmd.Flags().Int64Var(&s.bytes, "bytes", 512<<20, "bytes of blocks of one measurement")
	cmd.Flags().IntVar(&s.blockBytes, "block-bytes", 1<<20, "bytes of one block, a multiple of 4 KiB")
	cmd.Flags().IntVar(&s.rounds, "rounds", 7, "measurements of each kind, of which the median counts")
	return cmd
}

func (s *diskSettings) check() error {
	if s.bytes < minDiskBytes || s.bytes > maxDiskBytes {
		return fmt.Errorf("--bytes is %d, must be %d to %d", s.bytes, minDiskBytes, int64(maxDiskBytes))
	}
	if s.blockBytes < minDiskBlockBytes || s.blockBytes > maxDiskBlockBytes || s.blockBytes%4096 != 0 {
		return fmt.Errorf("--block-bytes is %d, must be a multiple of 4096 from %d to %d", s.blockBytes, minDiskBlockBytes, maxDiskBlockBytes)
	}
	if s.rounds < 1 || s.rounds > maxDiskRounds {
		return fmt.Errorf("--rounds is %d, must be 1 to %d", s.rounds, maxDiskRounds)
	}
	return nil
}

func printDisk(out io.Writer, r *diskReport, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(out).Encode(r)
	}
	_, err := fmt.Fprintf(out, "write %.2f GB/s, the disk %.2f GB/s, ratio %.2f\nread  %.2f GB/s, the disk %.2f GB/s, ratio %.2f\n",
		r.WriteGBps, r.RawWriteGBps, r.WriteRatio, r.ReadGBps, r.RawReadGBps, r.ReadRatio)
	return err
}
