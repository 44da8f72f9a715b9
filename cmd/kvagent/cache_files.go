package main

import (
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/pool/dram"
)

// maxReclaimAge bounds --reclaim.
const maxReclaimAge = 10 * 365 * 24 * time.Hour

func cacheFilesCommand() *cobra.Command {
	var reclaim time.Duration
	cmd := &cobra.Command{
		Use:   "files [DIR]",
		Short: "List the files that pools are kept in, and give the memory of abandoned ones back",
		Long: `Files lists the pools' files in a directory, /dev/shm unless another is given: those of --dram-path. It asks no agent. An abandoned
one is used by no process and holds its memory until it is removed; an agent that is down for a moment has left one, too. --reclaim removes the
abandoned ones that were not in use for at least so long, and nothing else.`,
		Example: `  kvagent cache files
  kvagent cache files /dev/hugepages --reclaim 24h`,
		Args: checkArgs(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir := "/dev/shm"
			if len(args) == 1 {
				dir = args[0]
			}
			files, err := dram.ListFiles(dir)
			if err != nil {
				return fmt.Errorf("cache files: %w", err)
			}
			if err := printFiles(cmd.OutOrStdout(), files); err != nil || !cmd.Flags().Changed("reclaim") {
				return err
			}
			return reclaimFiles(cmd.OutOrStdout(), files, reclaim)
		},
	}
	cmd.Flags().Var(&durationValue{&reclaim, 0, maxReclaimAge}, "reclaim", "remove abandoned files that were not in use for so long")
	return cmd
}

func printFiles(out io.Writer, files []dram.FileInfo) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "FILE\tSTATE\tMEMORY\tLAST IN USE\tPROCESS\tHOST")
	for i := range files {
		f := &files[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%v ago\t%d\t%s\n", f.Path, f.State, humanSize(f.Allocated), f.Age.Round(time.Second), f.Process, f.Host)
	}
	return t.Flush()
}

// reclaimFiles removes what nobody uses; a file that an agent took meanwhile is locked, and stays.
func reclaimFiles(out io.Writer, files []dram.FileInfo, age time.Duration) error {
	var bytes int64
	var errs error
	n := 0
	for i := range files {
		f := &files[i]
		if f.State != dram.Abandoned || f.Age < age {
			continue
		}
		if err := dram.RemoveFile(f.Path); err != nil {
			errs = errors.Join(errs, err)
			continue
		}
		n, bytes = n+1, bytes+f.Allocated
	}
	fmt.Fprintf(out, "removed %d files, %s\n", n, humanSize(bytes))
	return errs
}
