package image

import (
	"bufio"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/uverbsd/uverbsd/integration/internal/cpio"
	"github.com/uverbsd/uverbsd/integration/internal/payload"
)

// resolve returns the files to load for the wanted modules, dependencies first, relative to modDir
// (lib/modules/VERSION). It reads depmod's own modules.dep and modules.builtin.
func resolve(modDir string, wanted []bootModule) ([]string, error) {
	deps := map[string][]string{} // file -> files it needs, in depmod's order: the nearest first
	files := map[string]string{}  // module name -> file
	err := eachLine(filepath.Join(modDir, "modules.dep"), func(line string) error {
		file, rest, ok := strings.Cut(line, ":")
		if !ok {
			return fmt.Errorf("line %q has no colon", line)
		}
		files[moduleName(file)] = file
		deps[file] = strings.Fields(rest)
		return nil
	})
	if err != nil {
		return nil, err
	}
	builtin := map[string]bool{}
	err = eachLine(filepath.Join(modDir, "modules.builtin"), func(line string) error {
		builtin[moduleName(line)] = true
		return nil
	})
	if err != nil {
		return nil, err
	}
	var order []string
	for _, m := range wanted {
		file, ok := files[m.Name]
		switch {
		case ok:
			// modules.dep lists a module's whole closure with the deepest last.
			for _, d := range slices.Backward(deps[file]) {
				if !slices.Contains(order, d) {
					order = append(order, d)
				}
			}
			if !slices.Contains(order, file) {
				order = append(order, file)
			}
		case !builtin[m.Name] && !m.Optional:
			return nil, fmt.Errorf("the kernel in %s has no module %s", modDir, m.Name)
		}
	}
	return order, nil
}

// moduleName turns kernel/fs/ext4/ext4.ko.xz into ext4.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

func eachLine(file string, f func(string) error) error {
	in, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("read kernel module list: %w", err)
	}
	defer func() { _ = in.Close() }()
	s := bufio.NewScanner(in)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		if err := f(s.Text()); err != nil {
			return fmt.Errorf("read %s: %w", file, err)
		}
	}
	if err := s.Err(); err != nil {
		return fmt.Errorf("read %s: %w", file, err)
	}
	return nil
}

// writeModules writes the boot archive: the modules, the list of them, and the two device nodes that a program needs
// before it can mount devtmpfs. It is not compressed: unpacking would cost more in the guest than copying.
func writeModules(file, modDir string, wanted []bootModule) (err error) {
	order, err := resolve(modDir, wanted)
	if err != nil {
		return err
	}
	out, err := os.Create(file)
	if err != nil {
		return fmt.Errorf("create boot archive: %w", err)
	}
	defer func() {
		if cerr := out.Close(); err == nil && cerr != nil {
			err = fmt.Errorf("write boot archive: %w", cerr)
		}
	}()
	buf := bufio.NewWriterSize(out, 1<<20)
	w := cpio.NewWriter(buf)
	for _, d := range []string{"proc", "sys", "dev", "mnt"} {
		_ = w.Dir(d)
	}
	_ = w.CharDevice("dev/console", 5, 1)
	_ = w.CharDevice("dev/null", 1, 3)
	var list strings.Builder
	for _, m := range order {
		name := "/modules/" + path.Base(m)
		fmt.Fprintln(&list, name)
		if err := w.Tree(name, filepath.Join(modDir, m), 0o644); err != nil {
			return err
		}
	}
	_ = w.Bytes(payload.ModuleList, 0o644, []byte(list.String()))
	if err := w.Close(); err != nil {
		return fmt.Errorf("write boot archive: %w", err)
	}
	if err := buf.Flush(); err != nil {
		return fmt.Errorf("write boot archive: %w", err)
	}
	return nil
}
