package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/url"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/settings"
)

func cacheCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cache",
		Short: "Show what a running agent has stored, and remove it",
		Example: `  kvagent cache ls --model meta-llama/Llama-3.1-8B
  kvagent cache ls --tier disk
  kvagent cache ls --tier disk --space 6f1c --blocks 20
  kvagent cache stat --tier disk
  kvagent cache stat --tenant acme
  kvagent cache rm --tenant acme
  kvagent cache rm --tier disk --tenant acme --dry-run`,
	}
	cmd.AddCommand(cacheListCommand(), cacheStatCommand(), cacheRemoveCommand(), cacheFilesCommand())
	return cmd
}

// cacheSettings are the settings of the cache commands.
type cacheSettings struct {
	dir                  *string
	space, model, tenant string
	tier                 string
	asJSON               bool
}

func cacheBase(s *cacheSettings, use, short, long string,
	run func(*cobra.Command, *cacheSettings) error) *cobra.Command {
	s.dir = socketDirSetting()
	cmd := &cobra.Command{
		Use: use, Short: short, Long: long, Args: settings.Args(cobra.NoArgs),
		PreRunE: fill,
		RunE:    func(cmd *cobra.Command, _ []string) error { return run(cmd, s) },
	}
	addSocketDir(cmd, s.dir)
	cmd.Flags().BoolVar(&s.asJSON, "json", false, "print the agent's answer as JSON")
	return cmd
}

// addFilter adds the flags that pick spaces.
func (s *cacheSettings) addFilter(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.space, "space", "", "only the space with this fingerprint, or its first hex digits")
	cmd.Flags().StringVar(&s.model, "model", "", "only spaces of this model")
	cmd.Flags().StringVar(&s.tenant, "tenant", "", "only spaces of this tenant")
}

func (s *cacheSettings) addTier(cmd *cobra.Command, usage string) {
	cmd.Flags().StringVar(&s.tier, "tier", "", usage)
}

// memoryTier is the name of the pool among the tiers.
const memoryTier = "memory"

func (s *cacheSettings) query() string { return "?" + s.filter().Encode() }

// filter returns the query parameters that pick spaces.
func (s *cacheSettings) filter() url.Values {
	q := url.Values{}
	for key, value := range map[string]string{"space": s.space, "model": s.model, "tenant": s.tenant} {
		if value != "" {
			q.Set(key, value)
		}
	}
	return q
}

const cacheListHelp = `Ls lists the spaces that engines registered since the agent started. A space is everything
besides the tokens that determines a block's bytes, such as model, data type and tenant, under one fingerprint.
The blocks shown are those in memory, of all ranks.

With --tier it lists the contents of that tier by space, including what other agents, or this one before a reset,
stored there: such a space has no model, and its name is that in the tier. Shards are parts of blocks: a block has
one for each rank that stores other bytes. The tier is read for at most 5 seconds; a list that was cut is marked.
All tiers but Mooncake can be listed.`

func cacheListCommand() *cobra.Command {
	s := &cacheSettings{}
	blocks, skip := 0, 0
	cmd := cacheBase(s, "ls", "List the spaces an agent knows, or what a tier holds", cacheListHelp,
		func(cmd *cobra.Command, s *cacheSettings) error {
			if s.tier == "" || s.tier == memoryTier {
				if cmd.Flags().Changed("blocks") || cmd.Flags().Changed("skip") {
					return settings.Invalid(errors.New("blocks, skip: allowed with --tier"))
				}
				return listCache(cmd, s)
			}
			return listTier(cmd, s, blocks, skip)
		})
	s.addFilter(cmd)
	s.addTier(cmd, "list the contents of this tier; memory is the pool")
	cmd.Flags().Var(settings.Count(&blocks, 0, admin.MaxTierBlocks), "blocks", "also list this many shards")
	cmd.Flags().Var(settings.Count(&skip, 0, math.MaxInt32), "skip", "skip this many shards before those")
	return cmd
}

// showCache asks what is stored, and prints the answer as it is, or by print.
func showCache(cmd *cobra.Command, s *cacheSettings, print func(out io.Writer, st *admin.CacheStatus) error) error {
	body, err := adminclient.New(*s.dir).Get(cmd.Context(), "/cache"+s.query())
	if err != nil {
		return err
	}
	return show(cmd, body, s.asJSON, print)
}

func listCache(cmd *cobra.Command, s *cacheSettings) error {
	return showCache(cmd, s, func(out io.Writer, st *admin.CacheStatus) error { return printSpaces(out, st.Spaces) })
}

func printSpaces(out io.Writer, spaces []admin.CacheSpace) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SPACE\tMODEL\tTENANT\tDTYPE\tGROUPS\tRANKS' SHARDS\tEPOCH\tENGINES\tBLOCKS")
	for i := range spaces {
		s := &spaces[i]
		blocks := "not counted"
		if s.Blocks >= 0 {
			blocks = settings.Thousands(int(s.Blocks))
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%s\n", s.Space, s.Model, s.Tenant, s.Dtype, s.Groups, s.Shards,
			s.Epoch, s.Engines, blocks)
	}
	return t.Flush()
}

const cacheRemoveHelp = `Rm starts a new weights epoch of the spaces that --space, --model and --tenant pick, as a
reset by an engine does. Nothing stored of them before is found again, in memory or in any tier, and their engines are
notified. Other nodes that share a tier follow within seconds, and share again what is stored from
then on. Memory is free at once; what tiers hold under the old name is not read again.

With --tier only that tier's values of the spaces are deleted, for every agent that uses it. Memory and other tiers
keep theirs, and blocks may be written to the tier again. --space then also takes a name that ls --tier shows.
All tiers but Mooncake can do that.`

func cacheRemoveCommand() *cobra.Command {
	s := &cacheSettings{}
	dry := false
	cmd := cacheBase(s, "rm", "Remove what is stored of some spaces", cacheRemoveHelp,
		func(cmd *cobra.Command, s *cacheSettings) error {
			switch {
			case s.space+s.model+s.tenant == "":
				return settings.Invalid(errors.New("no filter given, allowed: one or more of --space, --model, " +
					"--tenant"))
			case s.tier == memoryTier:
				return settings.Invalid(errors.New("tier: memory, allowed: a tier below it; without --tier, memory " +
					"and all tiers are reset"))
			case s.tier != "":
				return removeFromTier(cmd, s, dry)
			case dry:
				return wouldRemove(cmd, s)
			}
			return removeCache(cmd, s)
		})
	s.addFilter(cmd)
	s.addTier(cmd, "delete only what this tier holds")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only say what would be removed")
	return cmd
}

func wouldRemove(cmd *cobra.Command, s *cacheSettings) error {
	return showCache(cmd, s, func(out io.Writer, st *admin.CacheStatus) error {
		fmt.Fprintf(out, "would remove what is stored of %d spaces\n", len(st.Spaces))
		return printSpaces(out, st.Spaces)
	})
}

func removeCache(cmd *cobra.Command, s *cacheSettings) error {
	body, err := adminclient.New(*s.dir).Post(cmd.Context(), "/cache/rm"+s.query(), nil)
	if err != nil {
		return err
	}
	return show(cmd, body, s.asJSON, func(out io.Writer, removed *admin.Removed) error {
		fmt.Fprintf(out, "removed what was stored of %d spaces\n", len(removed.Spaces))
		return printSpaces(out, removed.Spaces)
	})
}

// maxReclaimAge bounds --reclaim.
const maxReclaimAge = 10 * 365 * 24 * time.Hour

const cacheFilesHelp = `Files lists the pool files (those of --dram-path) in a directory, by default /dev/shm. It
does not ask an agent. An abandoned file is used by no process and holds its memory until it is removed; an agent that
is down for a moment has one, too. --reclaim removes the abandoned files that have been unused for at least that long,
and nothing else.`

func cacheFilesCommand() *cobra.Command {
	var reclaim time.Duration
	cmd := &cobra.Command{
		Use:   "files [DIR]",
		Short: "List the files of pools, and free the memory of abandoned ones",
		Long:  cacheFilesHelp,
		Example: `  kvagent cache files
  kvagent cache files /dev/hugepages --reclaim 24h`,
		Args: settings.Args(cobra.MaximumNArgs(1)),
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
	cmd.Flags().Var(settings.Duration(&reclaim, 0, maxReclaimAge), "reclaim",
		"remove abandoned files that have been unused for this long")
	return cmd
}

func printFiles(out io.Writer, files []dram.FileInfo) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "FILE\tSTATE\tMEMORY\tLAST IN USE\tPROCESS\tHOST")
	for i := range files {
		f := &files[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%v ago\t%d\t%s\n", f.Path, f.State, settings.HumanSize(f.Allocated),
			f.Age.Round(time.Second), f.Process, f.Host)
	}
	return t.Flush()
}

// reclaimFiles removes unused files; one that an agent has opened meanwhile is locked and stays.
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
		if err := os.Remove(f.Path + tokensSuffix); !errors.Is(err, fs.ErrNotExist) {
			errs = errors.Join(errs, err)
		}
	}
	fmt.Fprintf(out, "removed %d files, %s\n", n, settings.HumanSize(bytes))
	return errs
}
