package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/settings"
)

// calibrateCommand measures how copies are made best on the GPU that is seen.
func calibrateCommand() *cobra.Command {
	path, force, kernel := defaultCopyTables, false, false
	cmd := &cobra.Command{
		Use:   "calibrate",
		Short: "Measure how copies are made best on this type of GPU",
		Long: `Calibrate measures, on the one GPU that this process sees (CUDA_VISIBLE_DEVICES), for each length of runs whether single
copies, one call for many, or one call for rows at constant distances are fastest, and puts the table into a file that serve
reads at its start. It takes some seconds; other copies at the same time make it worse. A type of GPU that is in the file
already, with this driver, is left alone, unless --force. Serve does the same by itself when the first engine on a GPU registers.`,
		Example: `  CUDA_VISIBLE_DEVICES=0 kvagent calibrate
  kvagent calibrate --force --copy-tables /tmp/tables.json`,
		Args: settings.Args(cobra.NoArgs),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, _ []string) error { return calibrate(path, force, kernel, cmd.OutOrStdout()) },
	}
	cmd.Flags().StringVar(&path, "copy-tables", path, "file for the table")
	cmd.Flags().BoolVar(&kernel, "kernel", false, "measure the copy kernel too, which takes a few thread blocks from the engine; a table names it where it takes less than 3/4 of the best time of the copy engines")
	cmd.Flags().BoolVar(&force, "force", false, "measure a type of GPU that is in the file already")
	return cmd
}

func calibrate(path string, force, kernel bool, out io.Writer) (err error) {
	known, err := readCopyTables(path)
	if err != nil {
		fmt.Fprintf(out, "%v: measured again\n", err)
	}
	arena, err := unix.Mmap(-1, 0, cuda.MinPinPiece, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Munmap(arena) }() // no device is open any more
	d, err := cuda.Open(cuda.Options{Arena: arena, MeasureKernel: kernel})
	if err != nil {
		return err
	}
	defer func() {
		if again := d.Close(cudaipc.AllPeers); err == nil {
			err = again
		}
	}()
	i := d.Info()
	if known := cudaipc.FindCopyTable(known, i.Name, i.Driver); known != nil && !force {
		fmt.Fprintf(out, "%s (measured before, in %s)\n", known.String(), path)
		return nil
	}
	t, err := d.Calibrate(cuda.CalibrateWithin)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, t.String())
	return writeCopyTable(path, &t)
}
