package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/uverbsd/uverbsd/dispatch"
	"github.com/uverbsd/uverbsd/hca/soft"
)

func TestCommandsPage(t *testing.T) {
	var got bytes.Buffer
	if err := commandsPage(&got, dispatch.Commands(soft.Ops)); err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("../../docs/commands.md")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), want) {
		t.Error("docs/commands.md is not what `uverbsd commands --markdown` prints: generate it anew")
	}
}

func TestPrintCommands(t *testing.T) {
	var b bytes.Buffer
	if err := printCommands(&b, dispatch.Commands(soft.Ops)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0 ", "GET_CONTEXT", "ex 57", "MODIFY_CQ", "EOPNOTSUPP"} {
		if !bytes.Contains(b.Bytes(), []byte(want)) {
			t.Errorf("no %q in\n%s", want, b.Bytes())
		}
	}
}
